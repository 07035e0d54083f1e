"""Environments of NeMo-RL's `EnvironmentInterface`: one step of a batch of one conversation.

``step(message_logs, metadata)`` returns an ``EnvironmentReturn`` with observations, metadata,
rewards and terminateds, one entry a conversation. NeMo-RL makes such a class a Ray actor; here it
is an object in the environment's process, with or without ``@ray.remote``.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import check_names, loaded, prompt_messages
from aligner.environments.protocol import Reward, Start, Turn
from aligner.errors import ConfigError, DataError


class NeMoRLEnv:
    """A class of NeMo-RL's interface.

    Every message earns the reward of its step. Several rewards a step (``[1, K]``) are summed, as
    NeMo-RL sums them, and are reported as ``reward1`` to ``rewardK``. Stop strings of the next turn
    are not used: `length_params.end_strings` holds for all turns.
    """

    def __init__(
        self,
        *,
        seed: int,
        environment: str,
        config: Mapping[str, Any] | None = None,
        start: str | None = None,
        observation_role: str = "user",
        prompt: str | Sequence[Message] | None = None,
        extra_env_info: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """Make the class that ``environment`` names.

        Args:
            seed: for ``start``.
            environment: ``package.module:Class`` or ``path/to/file.py:Class``.
            config: its one argument; None: it has none.
            start: function ``(seed, **columns) -> (messages, metadata)`` in place of NeMo-RL's data
                processor; None: the columns ``prompt`` and ``extra_env_info``.
            observation_role: role of messages of the role ``environment``, which chat templates do
                not know.
            prompt: the row's.
            extra_env_info: the row's metadata; None: all its other columns.
            columns: all others of the row.
        """
        found = actor_class(loaded(environment, "environment"))
        self._environment = found() if config is None else found(dict(config))
        self._role = observation_role
        if start is not None:
            given = {"prompt": prompt, "extra_env_info": extra_env_info, **columns}
            asked, self._metadata = loaded(start, "start")(
                seed, **{name: value for name, value in given.items() if value is not None}
            )
            self._log = prompt_messages(asked)
        else:
            self._log = prompt_messages(prompt)
            self._metadata = columns if extra_env_info is None else dict(extra_env_info)
        if not self._log:
            raise DataError(
                "the conversation begins with no message; give the data a column prompt, or name a "
                "function as environment.kwargs.start"
            )

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a class that is none of the interface, before the run begins."""
        check_names(kwargs, "start")
        name = kwargs.get("environment")
        if name is not None and not callable(
            getattr(actor_class(loaded(name, "environment")), "step", None)
        ):
            raise ConfigError(f"environment.kwargs.environment={name!r} has no method step")

    def init(self) -> Start:
        """The first messages."""
        return Start([dict(message) for message in self._log])

    async def step(self, message: Mapping[str, Any]) -> Turn:
        """Step the environment with the conversation so far."""
        self._log.append({"role": "assistant", "content": message["content"]})
        returned = self._environment.step([[dict(each) for each in self._log]], [self._metadata])
        if inspect.isawaitable(returned):
            returned = await returned
        done = bool(returned.terminateds[0])
        observation = {key: returned.observations[0][key] for key in ("role", "content")}
        self._log.append(observation)
        if returned.metadata[0] is not None:  # NeMo-RL keeps the last one else
            self._metadata = returned.metadata[0]
        said = dict(observation)
        if said["role"] == "environment":
            said["role"] = self._role
        answer = returned.answers[0] if getattr(returned, "answers", None) else None
        info = {} if answer is None else {"answer": answer}
        return Turn([said] if said["content"] else [], reward_of(returned.rewards), done, info)

    def close(self) -> None:
        """Shut the environment down, where it can be."""
        shutdown = getattr(self._environment, "shutdown", None)
        if shutdown is not None:
            shutdown()


def actor_class(found: Any) -> Any:
    """The class below ``@ray.remote``; any other as it is."""
    metadata = getattr(found, "__ray_metadata__", None)
    if metadata is None:
        return found
    modified = metadata.modified_class
    return getattr(modified, "__ray_actor_class__", modified)


def reward_of(rewards: Any) -> Reward:
    """The reward of a batch of one: a number, or several by name or in a row, and their sum."""
    if isinstance(rewards, Mapping):
        parts = {str(name): float(values[0]) for name, values in rewards.items()}
        return {**parts, "reward": sum(parts.values())}
    first = rewards[0]
    value = first.tolist() if hasattr(first, "tolist") else first
    if not isinstance(value, list):
        return float(value)
    parts = {f"reward{number}": float(each) for number, each in enumerate(value, 1)}
    return {**parts, "reward": sum(parts.values())}
