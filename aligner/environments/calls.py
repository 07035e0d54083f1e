"""Tool calls in a policy's text, in the formats that docs/environments.md describes.

The formats come from transformers' documentation of tool use, and from the prompt formats that Meta
and Mistral describe. Environments' processes load this module, so it imports neither torch nor
numpy.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap, takewhile
from typing import Any, Literal, NamedTuple

from aligner.data.chat import Message, render
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError, TokenizerError

Form = Literal["hermes", "llama3", "mistral", "plain"]

_PLAIN = re.compile(r"^call (\w+) *(.*)$", re.M)
_PYTHON_TAG, _TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_OBJECT_WITH_NAME = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_MASS = {"type": "object", "properties": {"mass": {"type": "integer"}}}
_WEIGH_IT = {"name": "weigh_it", "description": "Weigh it.", "parameters": _MASS}
_WEIGHED = {"name": "weigh_it", "arguments": {"mass": 1}}
_JSON = json.JSONDecoder()
_SHORT = reprlib.Repr()  # unlike repr(), it accepts values of any depth
_SHORT.maxstring = _SHORT.maxother = 500


class ToolCall(NamedTuple):
    """A tool call of the policy."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None  # reason why the call cannot be executed
    id: str | None = None  # written by the policy

    def __str__(self) -> str:
        items = self.arguments.items()
        arguments = ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in items)
        return f"{self.name}({arguments})" + (f": {self.problem}" if self.problem else "")


class CallForm(NamedTuple):
    """Format of tool calls."""

    # Pattern of a call in a template's text. None if templates show neither functions nor results.
    sign: re.Pattern[str] | None
    begins: re.Pattern[str]  # pattern of the start of the calls in a message
    read: Callable[[str], list[ToolCall]]  # parses the calls of a message
    results: Callable[[Sequence[ToolCall], Sequence[str]], list[Message]]  # messages with results


def parse_calls(text: str, form: Form) -> list[ToolCall]:
    """Return the tool calls in a message of the policy. An invalid call has a ``problem``."""
    return FORMS[form].read(text)


def before_calls(text: str, form: Form) -> str:
    """Return the text of a policy's message before its first tool call."""
    match = FORMS[form].begins.search(text)
    return text if match is None else text[: match.start()]


def form_of(tokenizer: Tokenizer) -> Form:
    """Return the format of tool calls in the tokenizer's chat template, else ``plain``."""
    question: list[Message] = [{"role": "user", "content": "a"}]
    call = {"type": "function", "id": "abc123DEF", "function": _WEIGHED}
    chat = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    # Some templates show calls only if there are functions.
    for tools in (None, [{"type": "function", "function": _WEIGH_IT}]):
        try:
            question_text = render(tokenizer, question, tools, open_answer=False)
            text = render(tokenizer, chat, tools, open_answer=False)
        except (DataError, TokenizerError):
            continue
        for name, form in FORMS.items():
            if form.sign is not None and form.sign.search(text.removeprefix(question_text)):
                return name
    return "plain"


def numbered(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Return ``calls`` with unique ids of nine letters and digits. Valid ids are kept."""
    original_ids = {call.id for call in calls}
    free_ids = (f"call{number:05d}" for number in range(10**5))
    ids: dict[str, ToolCall] = {}
    for call in calls:
        call_id = call.id
        # Mistral's templates refuse other ids.
        if call_id is None or call_id in ids or not _MISTRAL_ID.fullmatch(call_id):
            call_id = next(free_id for free_id in free_ids if free_id not in original_ids)
        ids[call_id] = call
    return [call._replace(id=call_id) for call_id, call in ids.items()]


def structured(messages: Sequence[Message], form: Form) -> list[Message]:
    """Return the chat with tool calls in the key ``tool_calls`` instead of the content.

    Some templates require this. Each message of the role ``tool`` after an assistant message has an
    entry with the same id in the ``tool_calls`` of the assistant message.
    """
    chat: list[Message] = []
    for index, message in enumerate(messages):
        following = messages[index + 1 :]
        results = list(takewhile(lambda message: message["role"] == "tool", following))
        if message["role"] != "assistant" or not results or message.get("tool_calls"):
            chat.append(message)
            continue
        # An entry for each result, also if the calls cannot be parsed.
        calls = numbered(parse_calls(message["content"], form))
        calls += [ToolCall("unknown", {})] * (len(results) - len(calls))
        tool_calls = []
        for result, call in zip(results, calls, strict=False):
            function = {"name": call.name or "unknown", "arguments": call.arguments}
            call_id = result.get("tool_call_id", call.id)
            tool_calls.append({"type": "function", "id": call_id, "function": function})
        chat.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
    return chat


def _read_hermes(text: str) -> list[ToolCall]:
    """Parse JSON between ``<tool_call>`` tags, in linear time. The last closing tag is optional."""
    begin, end = "<tool_call>", "</tool_call>"
    problem = "a call is a JSON object with name and arguments"
    calls = []
    _, tag, text = text.partition(begin)
    while tag:
        call, _, text = text.partition(end)
        calls.append(_from_object(_json_value(call.strip()), "arguments", problem))
        _, tag, text = text.partition(begin)
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    """Parse JSON objects at the start of a message, or after ``<|python_tag|>``."""
    _, tag, tagged = text.partition(_PYTHON_TAG)
    text = (tagged if tag else text).strip()
    if not tag and not _OBJECT_WITH_NAME.match(text):  # it does not begin with a call
        return []
    problem = "a call is a JSON object with name and parameters"
    calls = [_from_object(value, "parameters", problem) for value in _json_values(text)]
    return calls or [ToolCall("", {}, problem)]


def _json_values(text: str) -> Iterator[Any]:
    """Yield JSON values separated by semicolons or white space. At an error, yield None and end."""
    start = 0
    while start < len(text):
        try:
            value, start = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError):
            value = None
        yield value
        if value is None:
            return
        while start < len(text) and (text[start].isspace() or text[start] == ";"):
            start += 1


def _read_mistral(text: str) -> list[ToolCall]:
    _, *parts = text.split(_TOOL_CALLS)
    problem = "a call is a JSON object with name and arguments, in a list"
    calls: list[ToolCall] = []
    for part in parts:
        match = _NAMED.match(part)
        if match:  # the format since version 11
            name, call_id = match.groups()
            calls.append(_parsed(name, part[match.end() :].strip(), call_id))
            continue
        # The older format. Text after the list is ignored.
        values = _json_value(part.strip(), lambda text: _JSON.raw_decode(text)[0])
        if not isinstance(values, list) or not values:
            values = [values]  # an object instead of a list, or an error
        calls += [_from_object(value, "arguments", problem) for value in values]
    return calls


def _json_value(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError):
        return None


def _from_object(value: Any, key: str, problem: str) -> ToolCall:
    """Return a call from JSON. Accepts ``arguments`` and ``parameters``: models confuse them."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, problem)
    other_key, call_id = "parameters" if key == "arguments" else "arguments", value.get("id")
    arguments = value.get(key, value.get(other_key, {}))
    return _parsed(value["name"], arguments, call_id if isinstance(call_id, str) else None)


def _parsed(name: str, arguments: Any, call_id: str | None = None) -> ToolCall:
    problem = None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            problem = "the arguments are no JSON"
    if problem is None and not isinstance(arguments, dict):
        problem = "the arguments are no JSON object"
    return ToolCall(name, {} if problem else arguments, problem, call_id)


def _tool_messages(calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(numbered(calls), results, strict=True)
    ]


def _result_lines(calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
    pairs = zip(calls, results, strict=True)
    lines = [f"result of {call.name}: {result}" for call, result in pairs]
    return [{"role": "user", "content": "\n".join(lines)}]


_TAG = re.compile(r"\[TOOL_CALLS\]")
_LLAMA = re.compile(r'\{"name": "weigh_it", "parameters":'), re.compile(r"<\|python_tag\|>|\A\s*\{")
FORMS: Mapping[Form, CallForm] = {
    "hermes": CallForm(
        re.compile(r"<tool_call>\s*\{"), re.compile("<tool_call>"), _read_hermes, _tool_messages
    ),
    "mistral": CallForm(_TAG, _TAG, _read_mistral, _tool_messages),
    "llama3": CallForm(*_LLAMA, _read_llama, _tool_messages),
    "plain": CallForm(
        None, _PLAIN, lambda text: list(starmap(_parsed, _PLAIN.findall(text))), _result_lines
    ),
}
