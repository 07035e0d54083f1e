"""Chat messages: their format, and rendering by the tokenizer's chat template.

If a template ignores a part of a message, an error names the part.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError, raised_as

Message = dict[str, Any]
Tools = list[dict[str, Any]]

MESSAGES = "prompt_messages"  # reward functions receive the prompts' messages under this name

# Optional keys of a message. tool_call_id and name identify the call that a tool's message answers.
# Templates that render calls in order ignore these two.
_OPTIONAL = {"tool_calls": list, "reasoning_content": str, "tool_call_id": str, "name": str}
# ShareGPT's name of a role → role.
_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user"}
_ROLES |= {"assistant": "assistant", "observation": "tool", "tool": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant")  # every template renders these
_MAX_OTHER_ROLES = 8  # a check renders the chat once for each


def parse_messages(value: str | Sequence[Any]) -> list[Message]:
    """Check a chat that the assistant has to answer, and return its messages.

    A message is ``{"role": text, "content": text}``. Optional keys are ``tool_calls`` (functions
    with name and arguments), ``reasoning_content``, ``tool_call_id`` and ``name``. With
    ``tool_calls``, ``content`` may be missing. Keys with null or an empty list of calls count as
    missing. Plain text becomes one message of the user. Raises `DataError` if the chat is invalid.
    """
    messages = _parse([{"role": "user", "content": value}] if isinstance(value, str) else value)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the last chat message is the assistant's. End the prompt with another message"
        )
    return messages


def parse_conversation(value: Sequence[Any]) -> list[Message]:
    """Check a chat that ends with the assistant's answer. Format and errors: `parse_messages`."""
    messages = _parse(value)
    first, last = messages[0]["role"], messages[-1]["role"]
    problem = ""
    if last != "assistant":
        problem = f"the last chat message has the role {last!r}. End with the assistant's answer"
    elif first == "assistant":
        problem = "the first chat message is the assistant's. Begin with a user message"
    if problem:
        raise DataError(problem)
    return messages


def parse_tools(columns: Mapping[str, Any], column: str | None) -> Tools | None:
    """Return the tools in ``columns[column]``, a list of JSON schemas or its JSON text, or None."""
    value = None if column is None else columns.get(column)
    value = _parsed_json(value, f"column {column!r} is")
    if value is not None and not (
        isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
    ):
        raise DataError(
            f"column {column!r} must be a list of functions (JSON schemas), or the list's JSON "
            f"text, got {type(value).__name__}. If it is not for tools, set data.tools_column=null"
        )
    return [dict(tool) for tool in value] if value else None


def _parsed_json(value: Any, subject: str) -> Any:
    if not isinstance(value, str):
        return value
    with raised_as(DataError, f"{subject} text that is not JSON", ValueError, RecursionError):
        return json.loads(value) if value.strip() else None


def _parse(value: Sequence[Any]) -> list[Message]:
    if not value:
        raise DataError("the list of chat messages is empty. Add a message or remove the row")
    return [_parse_message(message, index) for index, message in enumerate(value)]


def _parse_message(message: Any, index: int) -> Message:
    location = f"chat message {index}"
    required = {"role", "content"}
    if isinstance(message, Mapping) and message.keys() == {"from", "value"}:  # ShareGPT's form
        text = f"{location}: from={message['from']!r} is none of {', '.join(_ROLES)}"
        with raised_as(DataError, text, KeyError, remedy="write it with role and content"):
            message = {"role": _ROLES[message["from"]], "content": message["value"]}
    # Remove keys with null, which tables store for all messages if one message has the key.
    items = message.items() if isinstance(message, Mapping) else ()
    fields = {
        key: value
        for key, value in items
        if key in required or (value is not None and (key, value) != ("tool_calls", []))
    }
    if fields.get("tool_calls") and fields.get("content") is None:
        fields["content"] = ""
    # Check keys and types.
    problem = ""
    present = _OPTIONAL.keys() & fields.keys()
    wrong_types = [k for k in _OPTIONAL if k in present and not isinstance(fields[k], _OPTIONAL[k])]
    if not required <= fields.keys() <= {*required, *_OPTIONAL}:
        actual = sorted(map(str, message)) if fields else type(message).__name__
        problem = (
            f" must have exactly the keys role and content, and optionally {', '.join(_OPTIONAL)}, "
            f"got {actual}"
        )
    elif not all(isinstance(fields[key], str) for key in required):
        problem = ": role and content must be text"
    elif wrong_types:
        key = wrong_types[0]
        problem = f": {key} must be {'a list' if _OPTIONAL[key] is list else 'text'}"
    if problem:
        raise DataError(f"{location}{problem}")
    # Templates expect the arguments of calls as mappings.
    if "tool_calls" in fields:
        fields["tool_calls"] = [_parse_call(call, location) for call in fields["tool_calls"]]
    return fields


def _parse_call(call: Any, location: str) -> dict[str, Any]:
    """Return a tool call whose arguments, a mapping or JSON text in the data, are a mapping."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{location}: each of tool_calls must be a function with a name and arguments, got "
            f"{call!r:.80}"
        )
    # Some clients write "" as the arguments of a function without parameters.
    arguments = _parsed_json(
        function.get("arguments"), f"{location}: the arguments of {function['name']!r} are"
    )
    if not isinstance(arguments, Mapping | None):
        raise DataError(
            f"{location}: the arguments of {function['name']!r} must be a JSON object, got "
            f"{type(arguments).__name__}"
        )
    parsed = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Prepend a system message, unless ``system_prompt`` is None or there is one already."""
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
    """Return a chat as text. ``open_answer``: append the chat template's generation prompt."""
    options = {} if tools is None else {"tools": tools}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=open_answer, **options)


def check_all_used(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None = None
) -> None:
    """Raise `DataError` if the chat template ignores tools, calls, reasoning or unusual roles.

    A part is ignored if the chat without the part is rendered to the same text.
    """
    # Any template renders a chat without tools, optional keys and unusual roles.
    unusual = sorted({message["role"] for message in messages} - set(_KNOWN_ROLES))
    if len(unusual) > _MAX_OTHER_ROLES:
        raise DataError(
            f"the chat has {len(unusual)} roles other than {', '.join(_KNOWN_ROLES)}, but at most "
            f"{_MAX_OTHER_ROLES} are supported. Rename roles, or remove messages"
        )
    has_optional = any(_OPTIONAL.keys() & message for message in messages)
    if not unusual and tools is None and not has_optional:
        return
    text = render(tokenizer, messages, tools, open_answer=False)

    def is_ignored(remaining: Sequence[Message], remaining_tools: Tools | None) -> bool:
        try:
            return render(tokenizer, remaining, remaining_tools, open_answer=False) == text
        except DataError:  # the template requires the omitted part
            return False

    def without(key: str, except_role: str | None = None) -> list[Message]:
        return [
            {k: v for k, v in message.items() if k != key or message["role"] == except_role}
            for message in messages
        ]

    # Leave out each part once and compare the rendered text.
    trials: dict[str, tuple[list[Message], Tools | None]] = {
        "tools (data.tools_column=null omits them)": (list(messages), None),
        "tool_calls": (without("tool_calls"), tools),
        "name": (without("name", except_role="tool"), tools),
    }
    for role in unusual:
        remaining = [message for message in messages if message["role"] != role]
        trials[f"messages of role {role!r}"] = remaining, tools
    chat = list(messages), tools
    ignored = [part for part, trial in trials.items() if trial != chat and is_ignored(*trial)]
    # Test reasoning with a short chat, because templates drop the reasoning of earlier turns.
    if any("reasoning_content" in message for message in messages) and not (
        _shows_reasoning(tokenizer) or opened_tag(render(tokenizer, messages[:1]))
    ):
        ignored.append("reasoning_content")
    if ignored:
        raise DataError(
            f"the tokenizer's chat template ignores {' and '.join(ignored)}. Remove this from the "
            "messages, write it into their content, or use a model whose template renders it"
        )


def opened_tag(opening: str) -> str | None:
    """Return the tag that ends ``opening``, a generation prompt, such as ``<think>``, or None."""
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
