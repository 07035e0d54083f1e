"""Environments of verifiers, up to 0.3: its own loop runs, and asks the policy for each message."""

import asyncio
import functools
import json
import queue
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import LoopThread, imported, loaded, prompt_messages
from aligner.environments.calls import Form, parse_calls
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError, DataError

_PACKAGE = "'verifiers<0.4'"


class VerifiersEnv:
    """An environment of ``verifiers.load_environment``.

    The last message earns the reward of the rubric, whose metrics are reported; the others are not
    scored. What the environment shows must begin with what was said before: one that rewrites its
    history fails.
    """

    reads_calls: ClassVar[bool] = True

    def __init__(
        self,
        *,
        seed: int,
        environment: str,
        arguments: Mapping[str, Any] | None = None,
        form: Form = "hermes",
        prompt: str | Sequence[Message] | None = None,
        answer: str = "",
        info: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """Take the environment, which is made once in a process.

        Args:
            seed: chooses a row of the environment's own data where ``prompt`` is None.
            environment: a name of ``verifiers.load_environment``, or such a function as
                ``path/to/file.py:load_environment``.
            arguments: its keyword arguments.
            form: of calls, for environments with tools.
            prompt: the row's; the environment's system prompt is put before it.
            answer: the row's, for the rubric.
            info: the row's, for the rubric.
            columns: all others of the row; not used.
        """
        del columns
        self._environment = _made(environment, json.dumps(dict(arguments or {}), sort_keys=True))
        self._form: Form = form
        if prompt is None:
            data = self._environment.get_dataset()
            self._input = dict(data[random.Random(seed).randrange(len(data))])
        else:
            messages = prompt_messages(prompt)
            system = getattr(self._environment, "system_prompt", None)
            if system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
            self._input = {"prompt": messages, "answer": answer, "info": dict(info or {})}
        self._input = {"example_id": 0, **self._input}
        self._loop = LoopThread()
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._shown: list[Message] = []

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a missing package, another version or an unknown name, before the run begins."""
        found = imported("verifiers", _PACKAGE)
        if not hasattr(found, "MultiTurnEnv"):
            raise ConfigError(
                "this version of verifiers has no MultiTurnEnv: from 0.4 on its tasks are run with "
                "environment.kind=endpoint and environment.factory="
                "aligner.environments.adapters.verifiers_agent:run; for environments of before, "
                f"pip install {_PACKAGE}"
            )
        if ":" in kwargs.get("environment", ""):
            loaded(kwargs["environment"], "environment")

    def init(self) -> Start:
        """Begin its loop, up to the first message that it asks for."""
        self._running = self._loop.start(self._rollout())
        kind, value = self._event()
        if kind != "asks":
            raise DataError("the environment ended before it asked for a message")
        messages, tools = value
        self._shown = messages
        return Start(messages, tools)

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Give its loop the message, and go on to the next one that it asks for."""
        self._loop.run(self._answers.put(message["content"]))
        kind, value = self._event()
        if kind == "ended":
            reward, metrics = value
            return Turn(reward={**metrics, "reward": reward}, done=True)
        messages, _ = value
        known = len(self._shown) + 1
        if messages[: known - 1] != self._shown:
            raise DataError(
                "the environment shows earlier messages otherwise than it did before; the policy "
                "is trained on one conversation"
            )
        self._shown = messages
        return Turn(messages[known:])

    def close(self) -> None:
        """End its loop."""
        self._running.cancel()
        self._loop.close()

    def _event(self) -> tuple[str, Any]:
        kind, value = self._events.get()
        if kind == "raised":
            raise value
        return kind, value

    async def _rollout(self) -> None:
        try:
            client = _client_class()(self._events, self._answers, self._form)
            state = await self._environment.rollout(self._input, client, "policy", {})
            if state.get("error") is not None:
                raise state["error"]
            await self._environment.rubric.score_rollout(state)
            metrics = {
                str(name): float(value) for name, value in (state.get("metrics") or {}).items()
            }
            self._events.put(("ended", (state["reward"], metrics)))
        except BaseException as error:
            self._events.put(("raised", error))


@functools.cache
def _made(name: str, arguments: str) -> Any:
    given = json.loads(arguments)
    if ":" in name:
        return loaded(name, "environment")(**given)
    return imported("verifiers", _PACKAGE).load_environment(name, **given)


@functools.cache
def _client_class() -> Any:
    """A client of verifiers whose model is the policy."""
    verifiers = imported("verifiers", _PACKAGE)
    types = imported("verifiers.types", _PACKAGE)

    class Policy(verifiers.Client):  # type: ignore[name-defined]
        def __init__(self, events: Any, answers: Any, form: Form) -> None:
            self._events, self._answers, self._form = events, answers, form
            self._client = None

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Any:
            names = ("name", "description", "parameters")
            functions = [{name: getattr(tool, name) for name in names} for tool in tools or ()]
            schemas = [{"type": "function", "function": each} for each in functions] or None
            self._events.put(("asks", ([_message(each) for each in prompt], schemas)))
            text = await self._answers.get()
            calls = parse_calls(text, self._form) if schemas else []
            made = [
                types.ToolCall(
                    id=f"call_{number}", name=call.name, arguments=json.dumps(call.arguments)
                )
                for number, call in enumerate(calls)
            ]
            message = types.ResponseMessage(
                content=text,
                tool_calls=made or None,
                finish_reason="tool_calls" if made else "stop",
                is_truncated=False,
            )
            return types.Response(id="0", created=0, model=model, message=message)

    Policy.__abstractmethods__ = frozenset()  # only get_response is called
    return Policy


def _message(message: Any) -> Message:
    """Role and text of a message, whatever verifiers holds it in."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {"role": fields["role"], "content": content or ""}
