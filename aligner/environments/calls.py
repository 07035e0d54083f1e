"""Calls of tools in a policy's text: the forms in which models write them.

Form, its call, and how results go back:

``hermes``, Qwen's too: JSON between tags; messages of the role ``tool``. ::

    <tool_call>
    {"name": "add", "arguments": {"x": 1}}
    </tool_call>

``llama3``: the message is a JSON object, several are separated by semicolons, with or without
``<|python_tag|>`` before them; messages of the role ``tool`` (which the template shows as
``ipython``). ::

    {"name": "add", "parameters": {"x": 1}}

``mistral``: a list behind a token, or since the eleventh version of the format a name and its
arguments behind each; messages of the role ``tool`` with a ``tool_call_id`` of nine characters. ::

    [TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}

``plain``, for templates that know nothing of tools: a line; lines of a message of the user. ::

    call add {"x": 1}

The forms are those of the models' chat templates (transformers' documentation of tool use, Meta's
and Mistral's descriptions of their prompt formats). This module imports neither torch nor numpy: it
is loaded by environments' processes.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from aligner.data.chat import Message, Tools, render
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError, TokenizerError

Form = Literal["hermes", "llama3", "mistral", "plain"]

_HERMES = ("<tool_call>", "</tool_call>")
_PLAIN = re.compile(r"^call (\w+) *(.*)$", re.M)
_PYTHON_TAG, _TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_OBJECT_WITH_NAME = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_MASS = {"type": "object", "properties": {"mass": {"type": "integer"}}}
_WEIGH_IT = {"name": "weigh_it", "description": "Weigh it.", "parameters": _MASS}
_JSON = json.JSONDecoder()
_BRIEF = reprlib.Repr()  # also of what is nested too deeply for repr()
_BRIEF.maxstring = _BRIEF.maxother = 500


class ToolCall(NamedTuple):
    """A call that the policy made.

    ``problem``: why it cannot be made; None: it can. ``id``: by which its result is known, where
    the policy gave one.
    """

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    id: str | None = None

    def __str__(self) -> str:
        """``add(x=1)``, long values cut; and why it cannot be made."""
        given = ", ".join(f"{name}={_BRIEF.repr(value)}" for name, value in self.arguments.items())
        return f"{self.name}({given})" + (f": {self.problem}" if self.problem else "")


class CallForm(NamedTuple):
    """A row of the table of forms.

    ``sign``: what a template's text of a call holds; None: the template shows neither functions nor
    results, and text must. ``begins``: where the calls of a message begin. ``read``: the calls in a
    message. ``results``: the messages by which results go back.
    """

    sign: re.Pattern[str] | None
    begins: re.Pattern[str]
    read: Callable[[str], list[ToolCall]]
    results: Callable[[Sequence[ToolCall], Sequence[str]], list[Message]]

    @property
    def is_shown(self) -> bool:
        """True if the chat template shows the functions."""
        return self.sign is not None


def parse_calls(text: str, form: Form) -> list[ToolCall]:
    """The calls in a message of the policy, in their order; none where it makes none.

    One that cannot be read has a ``problem``.
    """
    return FORMS[form].read(text)


def before_calls(text: str, form: Form) -> str:
    """A message of the policy up to its calls."""
    found = FORMS[form].begins.search(text)
    return text if found is None else text[: found.start()]


def form_of(tokenizer: Tokenizer) -> Form:
    """The form in which a tokenizer's chat template shows calls; plain where it shows none."""
    # Some templates show calls only if there are functions.
    for tools in (None, [{"type": "function", "function": _WEIGH_IT}]):
        try:
            shown = _shown_call(tokenizer, tools)
        except (DataError, TokenizerError):
            continue
        for name, form in FORMS.items():
            if form.sign is not None and form.sign.search(shown):
                return name
    return "plain"


def numbered(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """The calls, each with an id of nine letters and digits of its own; the policy's are kept."""
    taken = {call.id for call in calls}
    free = (f"call{number:05d}" for number in range(10**5))
    result: list[ToolCall] = []
    seen: set[str] = set()
    for call in calls:
        one = call.id
        if one is None or one in seen or not _MISTRAL_ID.fullmatch(one):
            one = next(each for each in free if each not in taken)
        seen.add(one)
        result.append(call._replace(id=one))
    return result


def structured(messages: Sequence[Message], form: Form) -> list[Message]:
    """The chat with the calls of its messages apart from the text, as some templates want them.

    An assistant's message before messages of the role ``tool`` has one of ``tool_calls`` for each
    of these, with its ``tool_call_id``.
    """
    result: list[Message] = []
    for index, message in enumerate(messages):
        results = list(takewhile(lambda each: each["role"] == "tool", messages[index + 1 :]))
        if message["role"] != "assistant" or not results or message.get("tool_calls"):
            result.append(message)
            continue
        calls = numbered(parse_calls(message["content"], form))
        calls += [ToolCall("unknown", {})] * (len(results) - len(calls))
        made = [
            {
                "type": "function",
                "id": said.get("tool_call_id", call.id),
                "function": {"name": call.name or "unknown", "arguments": call.arguments},
            }
            for said, call in zip(results, calls, strict=False)
        ]
        result.append({"role": "assistant", "content": "", "tool_calls": made})
    return result


def _shown_call(tokenizer: Tokenizer, tools: Tools | None) -> str:
    """The template's text of a call by itself: what it adds to a chat."""
    question = {"role": "user", "content": "a"}
    function = {"name": "weigh_it", "arguments": {"mass": 1}}
    call = {"type": "function", "id": "abc123DEF", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = render(tokenizer, [question], tools, open_answer=False)
    shown = render(tokenizer, [question, said], tools, open_answer=False)
    return shown[len(before) :] if shown.startswith(before) else shown


def _read_hermes(text: str) -> list[ToolCall]:
    """JSON between tags, the last one perhaps open; in linear time, whatever stands between."""
    begin, end = _HERMES
    calls = []
    _, tag, text = text.partition(begin)
    while tag:
        inside, _, behind = text.partition(end)
        problem = "a call is a JSON object with name and arguments"
        calls.append(_from_object(_json_value(inside.strip()), "arguments", problem))
        _, tag, text = behind.partition(begin)
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    """JSON objects at the beginning of a message, or behind the tag."""
    _, tag, behind = text.partition(_PYTHON_TAG)
    text = (behind if tag else text).strip()
    if not tag and not _OBJECT_WITH_NAME.match(text):  # it does not begin with a call
        return []
    problem = "a call is a JSON object with name and parameters"
    calls: list[ToolCall] = []
    for found in _objects(text):
        if found is None:
            return [*calls, ToolCall("", {}, problem)]
        calls.append(_from_object(found, "parameters", problem))
    return calls or [ToolCall("", {}, problem)]


def _objects(text: str) -> Iterator[Any]:
    """JSON values that semicolons or white space separate; None and an end where there is none."""
    at = 0
    while at < len(text):
        try:
            value, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1


def _read_mistral(text: str) -> list[ToolCall]:
    _, *parts = text.split(_TOOL_CALLS)
    problem = "a call is a JSON object with name and arguments, in a list"
    calls: list[ToolCall] = []
    for part in parts:
        named = _NAMED.match(part)
        if named:
            name, given_id = named.groups()
            calls.append(_parsed(name, part[named.end() :].strip())._replace(id=given_id))
            continue
        values = _json_value(part.strip(), lambda text: _JSON.raw_decode(text)[0])
        if isinstance(values, dict):
            values = [values]
        if not isinstance(values, list) or not values:
            calls.append(ToolCall("", {}, problem))
            continue
        calls += [_from_object(value, "arguments", problem) for value in values]
    return calls


def _read_plain(text: str) -> list[ToolCall]:
    return [_parsed(name, arguments) for name, arguments in _PLAIN.findall(text)]


def _json_value(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    """The JSON value of a text; None if it cannot be read."""
    try:
        return parse(text)
    except (ValueError, RecursionError):
        return None


def _from_object(value: Any, arguments: str, problem: str) -> ToolCall:
    """A call out of JSON; models mix up ``arguments`` and ``parameters``."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, problem)
    other = "parameters" if arguments == "arguments" else "arguments"
    given = value.get("id")
    return _parsed(value["name"], value.get(arguments, value.get(other, {})))._replace(
        id=given if isinstance(given, str) else None
    )


def _parsed(name: str, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return ToolCall(name, {}, "the arguments are no JSON")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are no JSON object")
    return ToolCall(name, arguments)


def _as_tool_messages(calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(numbered(calls), results, strict=True)
    ]


def _as_lines(calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
    pairs = zip(calls, results, strict=True)
    lines = [f"result of {call.name}: {result}" for call, result in pairs]
    return [{"role": "user", "content": "\n".join(lines)}]


FORMS: Mapping[Form, CallForm] = {
    "hermes": CallForm(
        re.compile(r"<tool_call>\s*\{"), re.compile("<tool_call>"), _read_hermes, _as_tool_messages
    ),
    "mistral": CallForm(
        re.compile(r"\[TOOL_CALLS\]"),
        re.compile(r"\[TOOL_CALLS\]"),
        _read_mistral,
        _as_tool_messages,
    ),
    "llama3": CallForm(
        re.compile(r'\{"name": "weigh_it", "parameters":'),
        re.compile(r"<\|python_tag\|>|\A\s*\{"),
        _read_llama,
        _as_tool_messages,
    ),
    "plain": CallForm(None, _PLAIN, _read_plain, _as_lines),
}
