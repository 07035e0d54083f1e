"""Tools: Python functions that a policy may call.

A call is read from the policy's text in one of the forms of `aligner.environments.calls`, and its
result goes back as the next messages.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from aligner.compat.paths import published
from aligner.data.chat import Message
from aligner.environments.calls import FORMS, Form, ToolCall, parse_calls
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError
from aligner.importing import text_of

_PARAMETER = re.compile(r"^\s*(\w+)(?: *\([^)]*\))?: *(.*)$")
_MOST_CHARACTERS = 4000  # of a result
HOW_TO_CALL = 'To call a function, write a line such as: call NAME {"ARGUMENT": VALUE}'
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function, from its type hints and its docstring.

    The docstring is Google's: a description, and every parameter below ``Args:``. The result is
    that of ``transformers.utils.get_json_schema``, for the types that JSON has. A function with an
    attribute ``json_schema`` brings its own.

    Raises:
        ConfigError: no docstring, or a parameter without description or with a type that JSON has
            not.
    """
    own = getattr(function, "json_schema", None)
    if own is not None:
        return dict(own)
    name = getattr(function, "__name__", repr(function))
    description, described = _docstring(function, name)
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.name not in described:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} needs a type hint and a line below "
                "'Args:' of the docstring"
            )
        kind = _schema_of_type(hints[parameter.name], f"tool {name!r}: {parameter.name}")
        properties[parameter.name] = {**kind, "description": described[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described_function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described_function}


class ToolEnv:
    """An environment with tools; a subclass asks the question and scores the answer.

    A message with calls has them made, several at the same time, and earns what `call_reward`
    says; errors and unknown tools go back as text. A message without is the answer. Samples have
    the calls as ``info["calls"]``, a line each.

    A subclass with a parameter ``form`` is made with that of the tokenizer's chat template
    (`aligner.environments.calls.form_of`), unless ``environment.kwargs`` has it. ``calls_at_once``:
    of a message; with 1 one after the other, in their order.
    """

    reads_calls: ClassVar[bool] = True
    calls_at_once = 8

    def __init__(self, tools: Sequence[Callable[..., Any]], form: Form = "hermes") -> None:
        """Offer these functions."""
        if form not in get_args(Form):
            raise ConfigError(f"tools: form={form!r} is not one of {', '.join(get_args(Form))}")
        self._form = form
        self._schemas = [json_schema(tool) for tool in tools]
        self._tools = {tool.__name__: tool for tool in tools}

    def question(self) -> str:
        """The user's first message."""
        raise NotImplementedError

    def answered(self, text: str) -> Turn:
        """The end of the conversation with this answer."""
        raise NotImplementedError

    def call_reward(self, calls: Sequence[ToolCall], results: Sequence[str]) -> float | None:
        """Reward of a message that calls tools; default None: it is not scored."""
        del calls, results
        return None

    def init(self) -> Start:
        """Ask the question and show the tools."""
        if FORMS[self._form].is_shown:
            return Start([{"role": "user", "content": self.question()}], self._schemas)
        lines = [described(schema) for schema in self._schemas]
        text = "\n".join([*lines, self.question()])
        return Start([{"role": "user", "content": text}])

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Make the calls of a message; without any it is the answer."""
        calls = parse_calls(message["content"], self._form)
        if not calls:
            return self.answered(message["content"])
        with ThreadPoolExecutor(max_workers=self.calls_at_once) as threads:
            results = list(threads.map(self._result, calls))
        said = FORMS[self._form].results(calls, results)
        made = "\n".join(map(str, calls))
        return Turn(said, self.call_reward(calls, results), info={"calls": made})

    def _result(self, call: ToolCall) -> str:
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            text = str(tool(**call.arguments))
        except Exception as error:
            text = f"error: {type(error).__name__}: {text_of(error)}"
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def __getattr__(name: str) -> Any:
    """The calculator, which was published in this module."""
    return published(__name__, name)


def described(schema: Mapping[str, Any]) -> str:
    """Line by which the plain form describes a tool: a call of it, and its description.

    What a schema leaves out is empty: ``call now {}: ``.
    """
    function = schema.get("function", schema)
    properties = (function.get("parameters") or {}).get("properties") or {}
    values = {name: f"<{kind.get('type', 'value')}>" for name, kind in properties.items()}
    call = f"call {function.get('name')} {json.dumps(values)}"
    return f"{call}: {function.get('description') or ''}"


def tools_in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with a description of the tools, and of calls, in the first."""
    lines = [described(tool) for tool in tools]
    text = "\n".join([*lines, HOW_TO_CALL, messages[0]["content"]])
    return [{**messages[0], "content": text}, *messages[1:]]


def _docstring(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """Description, and that of every parameter."""
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"tool {name!r} has no docstring; it is what the policy reads of it")
    head, _, rest = text.partition("\nArgs:\n")
    block = re.split(r"\n(?:Returns|Raises):\n", rest)[0]
    described: dict[str, str] = {}
    last = None
    for line in block.splitlines():
        found = _PARAMETER.match(line)
        if found:
            last = found.group(1)
            described[last] = found.group(2).strip()
        elif last is not None and line.strip():
            described[last] += f" {line.strip()}"
    return re.split(r"\n(?:Returns|Raises):\n", head)[0].strip(), described


def _schema_of_type(hint: Any, place: str) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, arms = get_origin(hint), get_args(hint)
    if hint is list or origin is list:
        items = {"items": _schema_of_type(arms[0], place)} if arms else {}
        return {"type": "array", **items}
    if hint is dict or origin is dict:
        return {"type": "object"}
    if origin is Literal and all(isinstance(arm, str) for arm in arms):
        return {"type": "string", "enum": list(arms)}
    if origin in (Union, types.UnionType):
        others = [arm for arm in arms if arm is not type(None)]
        if len(others) == 1 and len(arms) == 2:
            return {**_schema_of_type(others[0], place), "nullable": True}
    raise ConfigError(
        f"{place}: type {hint} is none that a schema has here; use str, int, float, bool, list, "
        "dict, a Literal of texts, or one of them or None"
    )
