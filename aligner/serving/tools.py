"""Tools of a request: how the model is shown them, and the calls in what it answers."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.calls import Form, before_calls, parse_calls
from aligner.environments.tools import tools_in_text
from aligner.serving.openai_types import FunctionCall, ToolCall


def in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the plain form, for a template that shows neither tools nor calls.

    The functions are described before the first message, calls become lines of the assistant's, and
    results messages of the user.
    """
    names: dict[str, str] = {}
    plain: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if calls:
            lines = [message["content"]] if message.get("content") else []
            for call in calls:
                function = call.get("function", call)
                names[str(call.get("id"))] = function["name"]
                lines.append(f"call {function['name']} {json.dumps(function['arguments'])}")
            plain.append({"role": "assistant", "content": "\n".join(lines)})
        elif message["role"] == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "the tool")
            line = f"result of {name}: {message['content']}"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{line}"
            else:
                plain.append({"role": "user", "content": line, "is_result": True})
        else:
            plain.append(dict(message))
    for message in plain:
        message.pop("is_result", None)
    return tools_in_text(plain, tools) if tools else plain


def split_calls(text: str, form: Form) -> tuple[str | None, list[ToolCall]]:
    """Text before the calls, None where there is none; and the calls as OpenAI's answers have them.

    Text whose calls cannot be read is text alone.
    """
    calls = parse_calls(text, form)
    if not calls or any(call.problem is not None for call in calls):
        return text, []
    return before_calls(text, form).strip() or None, [
        ToolCall(
            id=call.id or uuid.uuid4().hex[:9],  # Mistral's templates refuse longer ones
            type="function",
            function=FunctionCall(name=call.name, arguments=json.dumps(call.arguments)),
        )
        for call in calls
    ]
