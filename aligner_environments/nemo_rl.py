"""Environments of NeMo-RL's `EnvironmentInterface`, stepped with batches of one conversation.

``step(message_logs, metadata)`` returns an ``EnvironmentReturn`` with observations, metadata,
rewards and terminateds, an entry per conversation. NeMo-RL makes such a class a Ray actor. Here it
is an object in the environment's process, with or without ``@ray.remote``.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.functions import loaded, prompt_messages
from aligner.environments.protocol import Reward, Start, Turn
from aligner.errors import ConfigError, DataError
from aligner_environments.foreign import check_names


class NeMoRLEnv:
    """Environment of a class with NeMo-RL's interface.

    The reward of a message is the reward of its step. Several rewards of a step (``[1, K]``) are
    summed, as in NeMo-RL, and reported as ``reward1`` to ``rewardK``. Stop strings of the next turn
    are not used, as `length_params.end_strings` applies to all turns.
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
        """Create an object of the class that ``environment`` names.

        docs/environments_adapters.md describes the arguments. ``seed``: argument of ``start``.
        """
        create = actor_class(loaded(environment, "environment"))
        self._environment = create() if config is None else create(dict(config))
        self._role = observation_role
        # The first messages and metadata, from a function or from the row.
        if start is not None:
            values = {"prompt": prompt, "extra_env_info": extra_env_info, **columns}
            values = {name: value for name, value in values.items() if value is not None}
            messages, self._metadata = loaded(start, "start")(seed, **values)
            self._log = prompt_messages(messages)
        else:
            self._log = prompt_messages(prompt)
            self._metadata = columns if extra_env_info is None else dict(extra_env_info)
        if not self._log:
            raise DataError(
                "the conversation begins with no message. Add a column 'prompt' to the data, or "
                "set a function as environment.kwargs.start"
            )

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if the class lacks NeMo-RL's methods."""
        check_names(kwargs, "start")
        name = kwargs.get("environment")
        cls_of_user = None if name is None else actor_class(loaded(name, "environment"))
        if cls_of_user is not None and not callable(getattr(cls_of_user, "step", None)):
            raise ConfigError(f"environment.kwargs.environment={name!r} has no method step")

    def init(self) -> Start:
        """Return the first messages."""
        return Start([dict(message) for message in self._log])

    async def step(self, message: Mapping[str, Any]) -> Turn:
        """Step the environment with the conversation so far."""
        self._log.append({"role": "assistant", "content": message["content"]})
        log = [dict(message) for message in self._log]
        result = self._environment.step([log], [self._metadata])
        if inspect.isawaitable(result):
            result = await result
        observation = {key: result.observations[0][key] for key in ("role", "content")}
        self._log.append(observation)
        if result.metadata[0] is not None:  # otherwise the metadata do not change, as in NeMo-RL
            self._metadata = result.metadata[0]
        # The environment sees its own role, the chat template the replacement.
        role = self._role if observation["role"] == "environment" else observation["role"]
        messages = [{**observation, "role": role}] if observation["content"] else []
        answer = result.answers[0] if getattr(result, "answers", None) else None
        info = {} if answer is None else {"answer": answer}
        return Turn(messages, reward_of(result.rewards), bool(result.terminateds[0]), info)

    def close(self) -> None:
        """Shut the environment down, if it has such a method."""
        getattr(self._environment, "shutdown", lambda: None)()


def actor_class(decorated: Any) -> Any:
    """Return the class without ``@ray.remote``, or the class itself if it is not decorated."""
    metadata = getattr(decorated, "__ray_metadata__", None)
    if metadata is None:
        return decorated
    modified = metadata.modified_class
    return getattr(modified, "__ray_actor_class__", modified)


def reward_of(rewards: Any) -> Reward:
    """Return the reward of a batch of one conversation, with the sum of several rewards."""
    if isinstance(rewards, Mapping):
        parts = {str(name): float(values[0]) for name, values in rewards.items()}
    else:
        value = rewards[0].tolist() if hasattr(rewards[0], "tolist") else rewards[0]
        if not isinstance(value, list):
            return float(value)
        parts = {f"reward{number}": float(reward) for number, reward in enumerate(value, 1)}
    return {**parts, "reward": sum(parts.values())}
