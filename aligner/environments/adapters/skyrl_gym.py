"""Environments of skyrl-gym: text in, messages and a reward out."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import imported, loaded, prompt_messages
from aligner.environments.protocol import Reward, Start, Turn
from aligner.errors import ConfigError

_PACKAGE = "skyrl-gym"


class SkyRLGymEnv:
    """An environment of ``skyrl_gym.make``.

    Every message earns the reward of its step; numbers of ``get_metrics`` are reported when the
    environment is done. A ``postprocessed_action`` is kept in ``info``: what was sampled stays, so
    give the string that ends an action as `length_params.end_strings`.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str | Sequence[Message],
        id: str | None = None,
        env_config: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """Make the environment.

        Args:
            seed: not used: skyrl-gym has none.
            prompt: the row's, which ``init`` is given.
            id: of ``skyrl_gym.make``, or ``path/to/file.py:Class``; None: the row's ``env_class``.
            env_config: the environment's settings, an attribute each.
            columns: all others of the row: the environment's ``extras``.
        """
        del seed
        name = id or columns.get("env_class")
        if not isinstance(name, str):
            raise ConfigError(
                "environment.kwargs.id is not set, and the data has no column env_class; set it to "
                "a name of skyrl_gym.make"
            )
        create = imported("omegaconf", "omegaconf").OmegaConf.create
        self._env = _registered(name).make(
            env_config=create(dict(env_config or {})), extras=columns
        )
        self._prompt = prompt_messages(prompt)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a missing package or an unknown name, before the run begins."""
        imported("skyrl_gym", _PACKAGE)
        if kwargs.get("id") is not None:
            _registered(kwargs["id"])

    def init(self) -> Start:
        """The prompt as the environment gives it."""
        messages, _ = self._env.init(self._prompt)
        return Start([dict(message) for message in messages])

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Step the environment with the text of a message."""
        output = self._env.step(message["content"])
        info = dict(output.get("metadata") or {})
        if output.get("postprocessed_action") is not None:
            info["postprocessed_action"] = output["postprocessed_action"]
        done = bool(output["done"])
        earned = float(output["reward"])
        reward: Reward = earned
        if done:
            metrics = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
            numbers = {name: each for name, each in metrics.items() if isinstance(each, Real)}
            reward = {str(name): float(each) for name, each in numbers.items()} | {"reward": earned}
        return Turn([dict(each) for each in output["observations"]], reward, done, info)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _registered(name: str) -> Any:
    """The specification of an environment, by its name or of a class."""
    registration = imported("skyrl_gym.envs.registration", _PACKAGE)
    if ":" in name:
        return registration.EnvSpec(id=name, entry_point=loaded(name, "id"))
    if name not in registration.registry:
        raise ConfigError(
            f"environment.kwargs.id={name!r} is none of skyrl-gym's environments: "
            f"{', '.join(sorted(registration.registry))}; one of your own is path/to/file.py:Class"
        )
    return registration.spec(name)
