"""Chat messages: their form, and the prompts made of them.

No part of a message is lost silently: parts that the tokenizer's template ignores are refused by
name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError, raised_as

Message = dict[str, Any]
Tools = list[dict[str, Any]]

# What a message may have beside role and content. The last two name the call that a tool answers;
# templates that show calls in order leave them out.
_OPTIONAL = {"tool_calls": list, "reasoning_content": str, "tool_call_id": str, "name": str}
_KNOWN_ROLES = ("system", "user", "assistant")  # every template has a place for
_MOST_ROLES = 8  # others than these: each takes a rendering of the chat


def parse_messages(value: Sequence[Any]) -> list[Message]:
    """A chat that waits for the assistant.

    A message is ``{"role": text, "content": text}``, and may have ``tool_calls`` (functions with
    name and arguments, then without ``content``), ``reasoning_content``, ``tool_call_id``,
    ``name``. Keys that are null, and an empty list of calls, count as absent.

    Raises:
        DataError: what is wrong; the caller adds where.
    """
    messages = _parse(value)
    if messages[-1]["role"] == "assistant":
        raise DataError("the last chat message is the assistant's; nothing is left to answer")
    return messages


def parse_conversation(value: Sequence[Any]) -> list[Message]:
    """A chat that the assistant has answered, as `parse_messages` else."""
    messages = _parse(value)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last chat message is of role {messages[-1]['role']!r}; it must be the "
            "assistant's, for that is what is learned"
        )
    if messages[0]["role"] == "assistant":
        raise DataError("the first chat message is the assistant's; nothing was asked before it")
    return messages


def parse_tools(columns: Mapping[str, Any], column: str | None) -> Tools | None:
    """JSON schemas of functions in a row: a list of them, or its JSON text; None: there are none.

    ``column``: where they stand; None: nowhere.
    """
    value = None if column is None else columns.get(column)
    value = _parsed_json(value, f"column {column!r} is")
    if value is not None and not (
        isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
    ):
        raise DataError(
            f"column {column!r} must be a list of functions (JSON schemas), or its JSON text, got "
            f"{type(value).__name__}; where it is something else set data.tools_column=null"
        )
    return [dict(tool) for tool in value] if value else None


def _parsed_json(value: Any, place: str) -> Any:
    """A text as JSON, empty text as None; other values as they are."""
    if not isinstance(value, str):
        return value
    with raised_as(DataError, f"{place} text that is no JSON", ValueError, RecursionError):
        return json.loads(value) if value.strip() else None


def _parse(value: Sequence[Any]) -> list[Message]:
    if not value:
        raise DataError("the list of chat messages is empty")
    return [_parse_message(message, index) for index, message in enumerate(value)]


def _parse_message(message: Any, index: int) -> Message:
    place = f"chat message {index}"
    if not isinstance(message, Mapping):
        raise DataError(
            f"{place} must have exactly the keys role and content, found {type(message).__name__}"
        )
    parsed = {
        key: value
        for key, value in message.items()
        if key in ("role", "content")
        or not (value is None or (key == "tool_calls" and value == []))
    }
    if parsed.get("tool_calls") and parsed.get("content") is None:
        parsed["content"] = ""
    if not {"role", "content"} <= parsed.keys() <= {"role", "content", *_OPTIONAL}:
        raise DataError(
            f"{place} must have exactly the keys role and content, and of others only "
            f"{', '.join(_OPTIONAL)}; found {sorted(map(str, message))}"
        )
    if not all(isinstance(parsed[part], str) for part in ("role", "content")):
        raise DataError(f"{place}: role and content must be text")
    for key, kind in _OPTIONAL.items():
        if key in parsed and not isinstance(parsed[key], kind):
            raise DataError(f"{place}: {key} must be {'a list' if kind is list else 'text'}")
    if "tool_calls" in parsed:
        parsed["tool_calls"] = [_parse_call(call, place) for call in parsed["tool_calls"]]
    return parsed


def _parse_call(call: Any, place: str) -> dict[str, Any]:
    """A call whose arguments are a mapping, as templates want them; in data they may be JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{place}: each of tool_calls must be a function with a name and arguments, got "
            f"{call!r:.80}"
        )
    # A function without parameters is called with "" by some clients.
    arguments = _parsed_json(
        function.get("arguments"), f"{place}: the arguments of {function['name']!r} are"
    )
    if not isinstance(arguments, Mapping | None):
        raise DataError(
            f"{place}: the arguments of {function['name']!r} must be a JSON object, got "
            f"{type(arguments).__name__}"
        )
    parsed = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def render_chat(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Any],
    *,
    system_prompt: str | None = None,
    tools: Tools | None = None,
) -> str:
    """Prompt text for messages, or for plain text taken as the user's one message.

    Args:
        tokenizer: its template is used.
        prompt: text, or a list of messages.
        system_prompt: put first unless the messages bring their own.
        tools: JSON schemas of functions that the assistant may call.
    """
    messages = parse_messages(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    messages = with_system(messages, system_prompt)
    check_all_used(tokenizer, messages, tools)
    return render(tokenizer, messages, tools)


def with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The messages with a system prompt first, unless they bring their own or it is None."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None = None,
    *,
    open_answer: bool = True,
) -> str:
    """The template's text; ``open_answer``: with the opening of the assistant's next message."""
    further = {} if tools is None else {"tools": tools}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=open_answer, **further)


def check_all_used(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None = None
) -> None:
    """Refuse parts that the template ignores: tools, calls, reasoning, unusual roles.

    A part is ignored if the text is the same without it. Reasoning is tried in a chat of its own,
    for templates drop that of earlier turns on purpose.
    """
    unusual = sorted({message["role"] for message in messages} - set(_KNOWN_ROLES))
    if len(unusual) > _MOST_ROLES:
        raise DataError(
            f"the chat has messages of {len(unusual)} roles beside {', '.join(_KNOWN_ROLES)}; at "
            f"most {_MOST_ROLES} are taken"
        )
    if (
        not unusual
        and tools is None
        and not any(_OPTIONAL.keys() & message for message in messages)
    ):
        return
    whole = render(tokenizer, messages, tools, open_answer=False)

    def is_lost(fewer: Sequence[Message], fewer_tools: Tools | None) -> bool:
        try:
            return render(tokenizer, fewer, fewer_tools, open_answer=False) == whole
        except DataError:  # it misses what was left out
            return False

    def without(left_out: str, kept_role: str | None = None) -> list[Message]:
        return [
            {k: v for k, v in message.items() if k != left_out or message["role"] == kept_role}
            for message in messages
        ]

    trials: dict[str, tuple[list[Message], Tools | None]] = {
        "tools (data.tools_column=null leaves them out)": (list(messages), None),
        "tool_calls": (without("tool_calls"), tools),
        "name": (without("name", kept_role="tool"), tools),
    }
    for role in unusual:
        others = [message for message in messages if message["role"] != role]
        trials[f"messages of role {role!r}"] = others, tools
    whole_chat = list(messages), tools
    lost = [part for part, less in trials.items() if less != whole_chat and is_lost(*less)]
    if any("reasoning_content" in message for message in messages) and not (
        _shows_reasoning(tokenizer) or opened_tag(render(tokenizer, messages[:1]))
    ):
        lost.append("reasoning_content")
    if lost:
        raise DataError(
            f"the tokenizer's chat template makes nothing of {' and '.join(lost)}; use a model "
            "whose template does, write it into content, or leave it out"
        )


def opened_tag(opening: str) -> str | None:
    """The tag that an opening of an answer ends with, as ``<think>``; None: with none."""
    last = opening.rstrip().rpartition("<")[2]
    is_tag = last.endswith(">") and last[:-1].isidentifier()
    return f"<{last}" if is_tag else None


def _shows_reasoning(tokenizer: Tokenizer) -> bool:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "some reasoning"},
    ]
    try:
        return "some reasoning" in render(tokenizer, chat, open_answer=False)
    except DataError:
        return False
