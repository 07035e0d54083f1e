"""Conversions of tools to text for the model, and of the model's text to tool calls."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.calls import Form, before_calls, parse_calls
from aligner.environments.tools import tools_in_text


def in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Write tool calls and results as plain text, for a chat template that supports neither."""
    names: dict[str, str] = {}
    plain: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            lines = [message["content"]] if message.get("content") else []
            for call in calls:
                function = call.get("function", call)
                names[str(call.get("id"))] = function["name"]
                lines.append(f"call {function['name']} {json.dumps(function['arguments'])}")
            plain.append({"role": "assistant", "content": "\n".join(lines)})
        # Consecutive results become one user message, as templates want roles to alternate.
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


def split_calls(text: str, form: Form) -> tuple[str | None, list[dict[str, Any]]]:
    """Return (text before the tool calls or None, calls in OpenAI's format).

    If a call cannot be parsed, the whole text and no calls are returned.
    """
    calls = parse_calls(text, form)
    if not calls or any(call.problem is not None for call in calls):
        return text, []
    return before_calls(text, form).strip() or None, [
        {
            "id": call.id or uuid.uuid4().hex[:9],  # Mistral's templates refuse longer ids
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
