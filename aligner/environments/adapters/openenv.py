"""Environments behind a server of OpenEnv: a session for each conversation, over a WebSocket."""

from collections.abc import Callable, Mapping
from typing import Any

from aligner.environments.adapters.foreign import (
    LoopThread,
    as_text,
    imported,
    loaded,
    user_message,
)
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError


class OpenEnvEnv:
    """A session of a running OpenEnv server.

    A message becomes an action and earns the reward of its step; None is not scored, as in OpenEnv.
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
        """Nothing is connected yet.

        Args:
            seed: of ``reset``.
            base_url: the server's, such as ``http://localhost:8000``.
            action: the field of an action that is the message's text, or a function that turns the
                text into all fields.
            observation: the field of an observation that is shown, or a function that turns all
                fields into text; None: all fields as JSON.
            instructions: text before the first observation.
            reset: further arguments of ``reset``.
            client: further arguments of OpenEnv's client, such as ``message_timeout_s``.
            columns: of the row; not used.
        """
        del columns
        make = imported("openenv.core.generic_client", "openenv").GenericEnvClient
        self._client = make(base_url=base_url, **(client or {}))
        self._act = _action(action)
        self._show = _shown(observation)
        self._instructions = instructions
        self._reset = {"seed": seed, **(reset or {})}
        self._loop = LoopThread()

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a missing package or function, before the run begins."""
        imported("openenv.core.generic_client", "openenv")
        _action(kwargs.get("action", "message"))
        _shown(kwargs.get("observation"))

    def init(self) -> Start:
        """Connect, reset and show the first observation."""
        self._loop.enter(self._client)
        result = self._loop.run(self._ask("reset", **self._reset))
        return Start(user_message(self._instructions, self._show(result.observation)))

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Take the action of a message."""
        result = self._loop.run(self._ask("step", self._act(message["content"])))
        reward = None if result.reward is None else float(result.reward)
        messages = user_message(self._show(result.observation))
        info = dict(getattr(result, "metadata", None) or {})
        return Turn(messages, reward, bool(result.done), info)

    def close(self) -> None:
        """End the session."""
        self._loop.close()

    async def _ask(self, name: str, *given: Any, **more: Any) -> Any:
        """Call the client in its loop: outside of one it is another client, a blocking one."""
        return await getattr(self._client, name)(*given, **more)


def _action(name: str) -> Callable[[str], Mapping[str, Any]]:
    if ":" not in name:
        return lambda text: {name: text}
    parse = loaded(name, "action")

    def act(text: str) -> dict[str, Any]:
        fields = parse(text)
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"environment.kwargs.action={name!r} returned {type(fields).__name__}; it must "
                "return the fields of an action"
            )
        return dict(fields)

    return act


def _shown(name: str | None) -> Callable[[Any], str]:
    if name is None:
        return lambda fields: as_text({k: v for k, v in fields.items() if k != "metadata"})
    if ":" in name:
        show = loaded(name, "observation")
        return lambda observation: str(show(observation))
    return lambda observation: as_text(observation[name])
