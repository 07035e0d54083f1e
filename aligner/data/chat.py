"""Chat messages: what they must look like, and how they become a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError

Message = dict[str, str]


def parse_messages(value: Sequence[Any]) -> list[Message]:
    """A chat that waits for the assistant: ``{"role": ..., "content": ...}``, no further keys.

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


def _parse(value: Sequence[Any]) -> list[Message]:
    if not value:
        raise DataError("the list of chat messages is empty")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            found = sorted(message) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(
                f"chat message {index} must have exactly the keys role and content, found {found}"
            )
        if not all(isinstance(part, str) for part in message.values()):
            raise DataError(f"chat message {index}: role and content must be text")
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def render_chat(
    tokenizer: Tokenizer, prompt: str | Sequence[Any], *, system_prompt: str | None = None
) -> str:
    """Prompt text for messages, or for plain text taken as the user's one message.

    Args:
        tokenizer: its template is used.
        prompt: text, or a list of messages.
        system_prompt: put first unless the messages bring their own.
    """
    messages = parse_messages(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tokenizer.apply_chat_template(messages)
