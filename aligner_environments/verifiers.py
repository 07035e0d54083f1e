"""Environments of verifiers up to 0.3, whose own loop requests each message of the policy.

init, step ─► answers ─► the loop's thread: the environment's rollout
     ▲                                  │
     └── events: request, ended, raised ◄──┘
"""

import asyncio
import functools
import json
import queue
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aligner.data.chat import Message
from aligner.environments.calls import Form, parse_calls
from aligner.environments.functions import loaded, prompt_messages
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError, DataError
from aligner_environments.foreign import LoopThread, imported

_PACKAGE = "'verifiers<0.4'"


class VerifiersEnv:
    """An environment of ``verifiers.load_environment``.

    The last message gets the reward of the rubric, whose metrics are reported. The other messages
    are not scored. An environment that rewrites earlier messages fails.
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
        """Load the environment, once per process.

        docs/environments_adapters.md describes the arguments. ``seed`` selects a row of the
        environment's data if ``prompt`` is None.
        """
        del columns
        self._environment = _load(environment, json.dumps(dict(arguments or {}), sort_keys=True))
        self._form: Form = form
        # The input of a rollout, from the environment's data or from the row.
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
        """Raise `ConfigError` for a missing package, another version or an unknown name."""
        if not hasattr(imported("verifiers", _PACKAGE), "MultiTurnEnv"):
            raise ConfigError(
                "this version of verifiers has no MultiTurnEnv: from 0.4 on its tasks are run with "
                "environment.kind=endpoint and environment.factory="
                "aligner_environments.verifiers_agent:run. For older environments, "
                f"pip install {_PACKAGE}"
            )
        if ":" in kwargs.get("environment", ""):
            loaded(kwargs["environment"], "environment")

    def init(self) -> Start:
        """Start the environment's loop, up to its first request."""
        self._rollout_task = self._loop.start(self._rollout())
        kind, value = self._event()
        if kind != "request":
            raise DataError("the environment ended before it requested a message")
        messages, tools = value
        self._shown = messages
        return Start(messages, tools)

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Pass a message to the environment's loop, which runs up to its next request."""
        self._loop.run(self._answers.put(message["content"]))
        kind, value = self._event()
        if kind == "ended":
            reward, metrics = value
            return Turn(reward={**metrics, "reward": reward}, done=True)
        # The new messages are those after the policy's message.
        messages, _ = value
        count = len(self._shown)
        if messages[:count] != self._shown:
            raise DataError(
                "the environment has changed earlier messages, but the policy is trained on one "
                "conversation"
            )
        self._shown = messages
        return Turn(messages[count + 1 :])

    def close(self) -> None:
        """End the environment's loop."""
        self._rollout_task.cancel()
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
            metrics = state.get("metrics") or {}
            parts = {str(name): float(value) for name, value in metrics.items()}
            self._events.put(("ended", (state["reward"], parts)))
        except BaseException as error:
            self._events.put(("raised", error))


@functools.cache
def _load(name: str, arguments: str) -> Any:
    kwargs = json.loads(arguments)
    if ":" in name:
        return loaded(name, "environment")(**kwargs)
    return imported("verifiers", _PACKAGE).load_environment(name, **kwargs)


@functools.cache
def _client_class() -> Any:
    """Return a client class of verifiers whose model is the policy."""
    verifiers = imported("verifiers", _PACKAGE)
    types = imported("verifiers.types", _PACKAGE)

    class PolicyClient(verifiers.Client):  # type: ignore[name-defined]
        def __init__(self, events: Any, answers: Any, form: Form) -> None:
            self._events, self._answers, self._form = events, answers, form
            self._client = None

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            # Request a message, and wait for `step` to pass its text.
            names = ("name", "description", "parameters")
            functions = [{name: getattr(tool, name) for name in names} for tool in tools or ()]
            schemas = [{"type": "function", "function": function} for function in functions] or None
            self._events.put(("request", ([_message(message) for message in prompt], schemas)))
            text = await self._answers.get()
            # The message with its tool calls.
            calls = parse_calls(text, self._form) if schemas else []
            tool_calls = [
                types.ToolCall(id=f"call_{n}", name=c.name, arguments=json.dumps(c.arguments))
                for n, c in enumerate(calls)
            ]
            message = types.ResponseMessage(
                content=text,
                tool_calls=tool_calls or None,
                finish_reason="tool_calls" if tool_calls else "stop",
                is_truncated=False,
            )
            return types.Response(id="0", created=0, model=model, message=message)

    PolicyClient.__abstractmethods__ = frozenset()  # only get_response is called
    return PolicyClient


def _message(message: Any) -> Message:
    """Return role and text of a message, which is a mapping or a pydantic model."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {"role": fields["role"], "content": content or ""}
