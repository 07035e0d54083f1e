"""Tools: Python functions that a policy may call in its text."""

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
_MAX_CHARACTERS = 4000  # length at which a result is cut
HOW_TO_CALL = 'To call a function, write a line such as: call NAME {"ARGUMENT": VALUE}'
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its type hints and its docstring.

    The docstring is in Google style, with every parameter below ``Args:``. The result equals that
    of ``transformers.utils.get_json_schema`` for types that exist in JSON. An attribute
    ``json_schema`` of the function replaces it. Raises `ConfigError` if the docstring is missing,
    or a parameter has no description or no JSON type.
    """
    if (schema := getattr(function, "json_schema", None)) is not None:
        return dict(schema)
    name = getattr(function, "__name__", repr(function))
    description, parameter_texts = _docstring(function, name)
    # A property for each parameter, from its type hint and the docstring.
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.name not in parameter_texts:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} needs a type hint and a line below "
                "'Args:' of the docstring"
            )
        kind = _schema_of_type(hints[parameter.name], f"tool {name!r}: {parameter.name}")
        properties[parameter.name] = {**kind, "description": parameter_texts[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": schema}


class ToolEnv:
    """An environment with tools. A subclass provides the question and scores the answer.

    `step` executes the calls of a message, several at the same time, and scores the message with
    `call_reward`. After an error or a call of an unknown tool, the result is an error message.
    A message without calls is the answer. ``info["calls"]`` of a sample contains a line per call.

    A subclass with a parameter ``form`` gets the format of calls in the tokenizer's chat template
    (`aligner.environments.calls.form_of`), unless ``environment.kwargs`` sets ``form``.
    ``calls_at_once``: maximum number of concurrent calls. With 1, calls are executed in order.
    """

    reads_calls: ClassVar[bool] = True
    calls_at_once = 8
    explains_calls = False  # whether the plain form also describes how a call is written

    def __init__(self, tools: Sequence[Callable[..., Any]], form: Form = "hermes") -> None:
        if form not in get_args(Form):
            raise ConfigError(f"tools: form={form!r} is not one of {', '.join(get_args(Form))}")
        self._form = form
        self._schemas = [json_schema(tool) for tool in tools]
        self._tools = {tool.__name__: tool for tool in tools}

    def question(self) -> str:
        """Return the text of the user's first message."""
        raise NotImplementedError

    def answered(self, text: str) -> Turn:
        """Score the answer ``text``, and return the last turn of the conversation."""
        raise NotImplementedError

    def call_reward(self, calls: Sequence[ToolCall], results: Sequence[str]) -> float | None:
        """Return the reward of a message with calls, by default None: the message is not scored."""
        del calls, results
        return None

    def init(self) -> Start:
        """Return the question and the tools."""
        messages = [{"role": "user", "content": self.question()}]
        if FORMS[self._form].sign:  # the chat template shows the functions
            return Start(messages, self._schemas)
        return Start(tools_in_text(messages, self._schemas, explained=self.explains_calls))

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Execute the calls of a message. A message without calls is the answer."""
        calls = parse_calls(message["content"], self._form)
        if not calls:
            return self.answered(message["content"])
        with ThreadPoolExecutor(max_workers=self.calls_at_once) as threads:
            results = list(threads.map(self._result, calls))
        messages = FORMS[self._form].results(calls, results)
        info = {"calls": "\n".join(map(str, calls))}
        return Turn(messages, self.call_reward(calls, results), info=info)

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
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def __getattr__(name: str) -> Any:
    """Return the calculator, which earlier versions defined in this module."""
    return published(__name__, name)


def tools_in_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, explained: bool = True
) -> list[Message]:
    """Describe ``tools`` at the start of the first message. ``explained``: add a sample call."""
    lines = []
    for schema in tools:
        function = schema.get("function", schema)
        properties = (function.get("parameters") or {}).get("properties") or {}
        values = {name: f"<{kind.get('type', 'value')}>" for name, kind in properties.items()}
        description = function.get("description") or ""
        lines.append(f"call {function.get('name')} {json.dumps(values)}: {description}")
    text = "\n".join([*lines, *([HOW_TO_CALL] if explained else []), messages[0]["content"]])
    return [{**messages[0], "content": text}, *messages[1:]]


def _docstring(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and the description of each parameter."""
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"tool {name!r} has no docstring. Add one: the policy reads it")
    description, _, parameters = (
        re.split(r"\n(?:Returns|Raises):\n", part)[0] for part in text.partition("\nArgs:\n")
    )
    # A parameter's text may continue on the next lines.
    parameter_texts: dict[str, str] = {}
    parameter = None
    for line in parameters.splitlines():
        match = _PARAMETER.match(line)
        if match:
            parameter = match.group(1)
            parameter_texts[parameter] = match.group(2).strip()
        elif parameter is not None and line.strip():
            parameter_texts[parameter] += f" {line.strip()}"
    return description.strip(), parameter_texts


def _schema_of_type(hint: Any, name: str) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    # Lists, mappings, literals of texts, and optional types.
    origin, arms = get_origin(hint) or hint, get_args(hint)
    if origin is list:
        return {"type": "array", **({"items": _schema_of_type(arms[0], name)} if arms else {})}
    if origin is dict:
        return {"type": "object"}
    if origin is Literal and all(isinstance(arm, str) for arm in arms):
        return {"type": "string", "enum": list(arms)}
    if origin in (Union, types.UnionType) and len(arms) == 2 and type(None) in arms:
        (arm,) = (arm for arm in arms if arm is not type(None))
        return {**_schema_of_type(arm, name), "nullable": True}
    raise ConfigError(
        f"{name}: a JSON schema cannot express the type {hint}. Use str, int, float, bool, list, "
        "dict, a Literal of texts, or a union of one of these with None"
    )
