"""Environments of skyrl-gym: text in, messages and a reward out."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from aligner.data.chat import Message
from aligner.environments.functions import loaded, prompt_messages
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError
from aligner_environments.foreign import imported

_PACKAGE = "skyrl-gym"


class SkyRLGymEnv:
    """An environment of ``skyrl_gym.make``.

    The reward of a message is the reward of its step. Numbers of ``get_metrics`` are reported when
    the environment is done. A ``postprocessed_action`` is only stored in ``info``, as sampled
    tokens do not change. Set the string that ends an action in `length_params.end_strings`.
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
        """Make the environment. docs/environments_adapters.md describes the arguments."""
        del seed
        name = id or columns.get("env_class")
        if not isinstance(name, str):
            raise ConfigError(
                "environment.kwargs.id is not set, and the data has no column env_class. Set it to "
                "a name of skyrl_gym.make"
            )
        create = imported("omegaconf", "omegaconf").OmegaConf.create
        settings = create(dict(env_config or {}))
        self._env = _registered(name).make(env_config=settings, extras=columns)
        self._prompt = prompt_messages(prompt)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if the package is missing or the name unknown."""
        imported("skyrl_gym", _PACKAGE)
        if kwargs.get("id") is not None:
            _registered(kwargs["id"])

    def init(self) -> Start:
        """Return the prompt of the environment."""
        messages, _ = self._env.init(self._prompt)
        return Start([dict(message) for message in messages])

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Step the environment with the text of a message."""
        output = self._env.step(message["content"])
        info = dict(output.get("metadata") or {})
        if output.get("postprocessed_action") is not None:
            info["postprocessed_action"] = output["postprocessed_action"]
        messages = [dict(observation) for observation in output["observations"]]
        reward, is_over = float(output["reward"]), bool(output["done"])
        if not is_over:
            return Turn(messages, reward, info=info)
        metrics = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        parts = {str(name): float(n) for name, n in metrics.items() if isinstance(n, Real)}
        return Turn(messages, {**parts, "reward": reward}, done=True, info=info)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _registered(name: str) -> Any:
    """Return the specification of a registered environment or of a class."""
    registration = imported("skyrl_gym.envs.registration", _PACKAGE)
    if ":" in name:
        return registration.EnvSpec(id=name, entry_point=loaded(name, "id"))
    if name not in registration.registry:
        raise ConfigError(
            f"environment.kwargs.id={name!r} is not in skyrl-gym's registry: "
            f"{', '.join(sorted(registration.registry))}. For your own: path/to/file.py:Class"
        )
    return registration.spec(name)
