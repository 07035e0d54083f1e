"""Environments of an OpenEnv server: a WebSocket session for each conversation."""

from collections.abc import Callable, Mapping
from typing import Any

from aligner.environments.functions import loaded
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError
from aligner_environments.foreign import LoopThread, as_text, imported, user_message


class OpenEnvEnv:
    """A session of a running OpenEnv server.

    A message is an action, and its reward is the reward of the step. A reward of None means that
    the message is not scored.
    """

    def __init__(
        self,
        *,
        seed: int,
        base_url: str,
        action: str = "message",
        observation: str | None = None,
        instructions: str | None = None,
        reset: Mapping[str, Any] | None = None,
        client: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """Create the client, without connecting.

        docs/environments_adapters.md describes the arguments.
        """
        del columns
        make = imported("openenv.core.generic_client", "openenv").GenericEnvClient
        self._client = make(base_url=base_url, **(client or {}))
        self._act = _action(action)
        self._text_of = _observation(observation)
        self._instructions = instructions
        self._reset = {"seed": seed, **(reset or {})}
        self._loop = LoopThread()

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if the package or a named function does not exist."""
        imported("openenv.core.generic_client", "openenv")
        _action(kwargs.get("action", "message"))
        _observation(kwargs.get("observation"))

    def init(self) -> Start:
        """Connect, reset and show the first observation."""
        self._loop.enter(self._client)
        result = self._loop.run(self._call("reset", **self._reset))
        return Start(user_message(self._instructions, self._text_of(result.observation)))

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Take the action of a message."""
        result = self._loop.run(self._call("step", self._act(message["content"])))
        reward = None if result.reward is None else float(result.reward)
        messages = user_message(self._text_of(result.observation))
        info = dict(getattr(result, "metadata", None) or {})
        return Turn(messages, reward, bool(result.done), info)

    def close(self) -> None:
        """End the session."""
        self._loop.close()

    async def _call(self, name: str, *arguments: Any, **kwargs: Any) -> Any:
        """Call the client within its loop, as outside of a loop the client blocks."""
        return await getattr(self._client, name)(*arguments, **kwargs)


def _action(name: str) -> Callable[[str], Mapping[str, Any]]:
    if ":" not in name:
        return lambda text: {name: text}
    # A name with a colon is a function instead of a field.
    parse = loaded(name, "action")

    def act(text: str) -> dict[str, Any]:
        fields = parse(text)
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"environment.kwargs.action={name!r} returned {type(fields).__name__}. It must "
                "return the fields of an action"
            )
        return dict(fields)

    return act


def _observation(name: str | None) -> Callable[[Any], str]:
    if name is None:
        return lambda fields: as_text({k: v for k, v in fields.items() if k != "metadata"})
    if ":" in name:
        text_of = loaded(name, "observation")
        return lambda observation: str(text_of(observation))
    return lambda observation: as_text(observation[name])
