"""Worked examples: sequences with tokens to learn.

A row is a prompt and its response, or a chat whose assistant messages are the responses. A response
may also be a list of chat messages: only the assistant's, or the complete chat. The response and
its end token are learned. The prompt and the template's text after the end token are not learned.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from aligner.config import ExampleDataConfig, PairDataConfig
from aligner.data.batches import pad_right
from aligner.data.chat import (
    Message,
    Tools,
    check_all_used,
    opened_tag,
    parse_conversation,
    parse_messages,
    parse_tools,
    render,
    with_system,
)
from aligner.data.dataset import Dataset
from aligner.data.prompts import check_plain_text
from aligner.data.readers import DataRow, take
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer, encode_after, with_bos
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError, raised_as


@dataclass(frozen=True)
class Examples:
    """Base class of items with sequences: examples, pairs, labelled and rated responses."""

    sequences: ClassVar[tuple[str, ...]] = ()  # names of the fields with the sequences

    @property
    def examples(self) -> tuple["Example", ...]:
        """Sequences of the item in the order of a batch."""
        return tuple(getattr(self, name) for name in self.sequences)

    def with_examples(self, examples: Sequence["Example"]) -> Self:
        """Return a copy of the item with other sequences."""
        return replace(self, **dict(zip(self.sequences, examples, strict=True)))

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(example.length for example in self.examples)


@dataclass(frozen=True)
class Example(Examples):
    """One sequence. ``id`` is its index in the source, dropped examples included."""

    id: int
    ids: list[int]
    learned: list[tuple[int, int]]  # [start, end) of the tokens in the loss
    ref_logprobs: Tensor | None = None  # float32 [N] of the N learned tokens, if known

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.ids)

    @property
    def examples(self) -> tuple["Example"]:
        """A tuple with only this example."""
        return (self,)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the last response."""
        return self.ids[: self.learned[-1][0]]

    @property
    def learned_tokens(self) -> int:
        """Number of tokens in the loss."""
        return sum(end - start for start, end in self.learned)


# Sections that define the conversion of rows, and their keys for the column of a response.
ExampleSection = ExampleDataConfig | PairDataConfig
ResponseKey = Literal["response_column", "chosen_column", "rejected_column"]


class ExampleDataset(Dataset[Example]):
    """All examples, in the order of their source."""

    keys = ("prompt_column", "response_column")

    @classmethod
    def make(
        cls, row: DataRow, index: int, tokenizer: Tokenizer, data: ExampleDataConfig
    ) -> Example:
        """See `make_example`."""
        return make_example(row, index, tokenizer, data)


def make_example(
    row: DataRow,
    index: int,
    tokenizer: Tokenizer,
    data: ExampleSection,
    response_key: ResponseKey = "response_column",
) -> Example:
    """Convert one row to an example. Errors name the row and its columns.

    ``response_key``: setting of ``data`` that holds the name of the response column.
    """
    treat = partial(treat_special_tokens, tokenizer, policy=data.special_tokens_in_text)
    with raised_as(DataError, row.location, DataError, remedy=row.remedy):
        text_column = data.text_column if isinstance(data, ExampleDataConfig) else None
        chat, learn, context = _conversation(row, data, response_key)
        if text_column is not None:
            text = treat(take(row, text_column, str, "data.text_column"), location=text_column)
            ids, learned = encode_text(tokenizer, text)
        elif chat is None:
            # Plain text.
            check_plain_text(data)
            if row.columns.get(data.tools_column or ""):
                raise DataError(
                    f"column {data.tools_column!r} contains tools, but the row is plain text, "
                    "which cannot include them. Set data.chat=true, or data.tools_column=null"
                )
            prompt = take(row, data.prompt_column, str, "data.prompt_column")
            column = getattr(data, response_key)
            response = take(row, column, str, f"data.{response_key}")
            prompt = treat(prompt, location=data.prompt_column)
            response = treat(response, location=column, is_answer=True)
            ids, learned = encode_pair(tokenizer, prompt, response)
        else:
            # A system prompt is part of the context.
            num_answers = len(chat) - context
            chat = with_system(treat(chat, location="messages"), data.system_prompt)
            tools = treat(parse_tools(row.columns, data.tools_column), location="tools")
            check_all_used(tokenizer, chat, tools)
            context = len(chat) - num_answers
            ids, learned = encode_chat(tokenizer, chat, learn, tools, context=context)
    if data.add_bos:
        without_bos, ids = len(ids), with_bos(tokenizer, ids)
        shift = len(ids) - without_bos
        learned = [(start + shift, end + shift) for start, end in learned]
    return Example(index, ids, learned)


def encode_pair(
    tokenizer: Tokenizer, prompt: str, response: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode ``prompt + response + EOS`` and return the ids and the span of the response.

    The prompt has the same tokens as without the response, because a model is prompted with those
    tokens. If the response ends with a token of ``end_ids``, no EOS is added.
    """
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        raise DataError("the prompt is empty")
    response_ids = encode_after(tokenizer, prompt_ids, prompt, response)
    if not response_ids or response_ids[-1] not in tokenizer.end_ids:
        response_ids = [*response_ids, tokenizer.eos_id]
    ids = [*prompt_ids, *response_ids]
    return ids, [(len(prompt_ids), len(ids))]


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode ``text + EOS``. All tokens but the first are learned, which nothing precedes."""
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError("the text is empty")
    ids = ids if ids[-1] in tokenizer.end_ids else [*ids, tokenizer.eos_id]
    return ids, [(1, len(ids))]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    learn: Literal["last", "all"] = "all",
    tools: Tools | None = None,
    *,
    context: int = 0,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a rendered chat and the spans of the assistant's messages.

    The first ``context`` messages are not learned. A span starts after the generation prompt of its
    message, and ends with the first token of ``tokenizer.end_ids``, or with the message if the
    template adds no end token. The last message always ends with an end token.

    The generation prompt of some templates ends with a tag that finished messages lack
    (``<think>`` in R1's distillations). Then the learned text of the last message is
    ``reasoning_content`` if present, the closing tag, and ``content``.

    Raises `DataError` if the template changes earlier messages (then set ``learn=last``), if the
    generation prompt does not precede the answer, or if an answer contains an end token.
    """
    # Remove end tokens of the data, then render and encode message by message.
    ends = {end: tokenizer.decode([end]) for end in tokenizer.end_ids}
    messages = [_without_end(tokenizer, message, ends) for message in messages]
    answers = [
        n for n, message in enumerate(messages) if message["role"] == "assistant" and n >= context
    ]
    text = ""
    ids: list[int] = []
    learned: list[tuple[int, int]] = []
    for index in answers if learn == "all" else answers[-1:]:
        _refuse_end_tokens(tokenizer, messages[index], index, ends)
        opening = render(tokenizer, messages[:index], tools)
        closed = render(tokenizer, messages[: index + 1], tools, open_answer=False)
        is_prefix = closed.startswith(opening)
        if not opening.startswith(text) or not (is_prefix or index == answers[-1]):
            raise DataError(
                f"the chat template changes earlier messages when message {index} is added. Set "
                "learn=last"
            )
        ids += encode_after(tokenizer, ids, text, opening[len(text) :])
        answer = closed[len(opening) :] if is_prefix else _after_tag(opening, messages[index])
        answer_ids = encode_after(tokenizer, ids, opening, answer)
        end = next((n for n, token in enumerate(answer_ids, 1) if token in tokenizer.end_ids), None)
        learned.append((len(ids), len(ids) + (end or len(answer_ids))))
        ids += answer_ids
        text = closed
    # The last message needs an end token, and no text after it.
    start, end = learned[-1]
    if ids[end - 1] not in tokenizer.end_ids or end == start:
        ids[end:] = [tokenizer.turn_end_id]
        learned[-1] = (start, end + 1)
    return ids[: learned[-1][1]], learned


def _without_end(tokenizer: Tokenizer, message: Message, ends: Mapping[int, str]) -> Message:
    """Remove an end token at the end of an assistant's message."""
    if message["role"] != "assistant":
        return message
    for end, token in ends.items():
        if token and message["content"].endswith(token) and tokenizer.encode(token) == [end]:
            return {**message, "content": message["content"].removesuffix(token)}
    return message


def _refuse_end_tokens(
    tokenizer: Tokenizer, message: Message, index: int, ends: Mapping[int, str]
) -> None:
    """Raise `DataError` if an answer spells an end token, because the rest is never learned."""
    parts = [message["content"], message.get("reasoning_content") or ""]
    if "tool_calls" in message:
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    for end, token in ends.items():
        if any(token in part and end in tokenizer.encode(part) for part in parts):
            raise DataError(
                f"message {index} of the chat spells the end token {token!r}, at which an answer "
                "ends. Write it in another way, or remove the row"
            )


def _after_tag(opening: str, message: Message) -> str:
    """Return the text of a message after a generation prompt that ends with a tag."""
    tag = opened_tag(opening)
    if tag is None:
        raise DataError(
            f"the chat template opens an answer with {opening[-40:]!r}, but finished messages "
            "begin differently, so that the learned text does not fit the model's prompt. Use "
            "plain-text prompts"
        )
    closing, content = f"</{tag[1:]}", message["content"]
    # Close the tag before the content.
    if message.get("reasoning_content") is not None:
        return f"{message['reasoning_content'].strip()}\n{closing}\n\n{content}"
    if closing not in content:
        return f"\n{closing}\n\n{content}"
    stripped: str = content.lstrip()
    return stripped.removeprefix(tag).lstrip("\n") if stripped.startswith(tag) else content


def collate_examples(examples: Sequence[Example], pad_id: int) -> BatchedDataDict:
    """Collate examples to a batch.

    The columns are ``input_ids`` int64 [B, S] (right-padded), ``input_lengths`` int64 [B],
    ``token_mask`` float32 [B, S] (1 for learned tokens) and ``sample_mask`` float32 [B] (all 1). If
    the examples have log-probs, also ``ref_logprobs`` float32 [B, S], 0 where the mask is 0.
    """
    ids, lengths = pad_right([example.ids for example in examples], pad_id)
    # Learned tokens are 1.
    mask = torch.zeros(ids.shape)
    for row, example in zip(mask, examples, strict=True):
        for start, end in example.learned:
            row[start:end] = 1.0
    batch: BatchedDataDict = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(len(examples)),
        }
    )
    references = [e.ref_logprobs for e in examples if e.ref_logprobs is not None]
    if references:
        assert len(references) == len(examples), "some examples lack ref_logprobs"
        batch["ref_logprobs"] = torch.zeros(ids.shape).masked_scatter_(
            mask.bool(), torch.cat(references)
        )
    return batch


def response_note(examples: Iterable[Example], tokenizer: Tokenizer) -> str:
    """Describe the number of learned tokens, and the end of the first example with its mask."""
    examples = list(examples)
    learned = sum(example.learned_tokens for example in examples)
    tokens = sum(example.length for example in examples)
    ids, shown, position = examples[0].ids, "", 0
    for start, end in examples[0].learned:
        shown += f"{tokenizer.decode(ids[position:start])}⟦{tokenizer.decode(ids[start:end])}⟧"
        position = end
    shown = shown if len(shown) <= 240 else f"…{shown[-240:]}"
    return (
        f"{learned:,} of {tokens:,} tokens belong to responses. The first example, with "
        f"its responses between ⟦ and ⟧: {shown!r}"
    )


def _conversation(
    row: DataRow, data: ExampleSection, response_key: ResponseKey
) -> tuple[list[Message] | None, Literal["last", "all"], int]:
    """Return a row's chat (None for plain text), the learned answers, and the context's length."""
    if isinstance(data, ExampleDataConfig) and data.text_column is not None:
        return None, "last", 0
    learn = data.learn if isinstance(data, ExampleDataConfig) else "last"
    if isinstance(data, ExampleDataConfig) and data.messages_column is not None:
        chat = take(row, data.messages_column, list, "data.messages_column")
        return parse_conversation(chat), learn, 0
    column = getattr(data, response_key)
    # The response is a list of messages, or text after a prompt.
    key = f"data.{response_key}"
    if isinstance(data, ExampleDataConfig):
        key += ", or a column of chats with data.messages_column"
    response = take(row, column, (str, list), key)
    prompt = row.get(data.prompt_column)
    if isinstance(response, list):
        chat, context = _answered(prompt, response, data.prompt_column, column)
        return chat, learn, context
    prompt = take(row, data.prompt_column, (str, list), "data.prompt_column")
    if isinstance(prompt, str) and not data.chat:
        return None, "last", 0
    return [*parse_messages(prompt), {"role": "assistant", "content": response}], "last", 0


def _answered(
    prompt: Any, response: list[Any], prompt_column: str, response_column: str
) -> tuple[list[Message], int]:
    """Return the complete chat of a list response, and the number of messages of its prompt."""
    first = response[0] if response else None
    if isinstance(first, Mapping) and first.get("role") == "assistant":
        if not isinstance(prompt, str | list):
            raise DataError(
                f"column {response_column!r} begins with the assistant's message, so column "
                f"{prompt_column!r} must contain the prompt. Name it with "
                "data.prompt_column"
            )
        messages = parse_messages(prompt)
        return parse_conversation([*messages, *response]), len(messages)
    # A complete chat must contain the prompt, if the row has one.
    chat = parse_conversation(response)
    users = [message["content"].strip() for message in chat if message["role"] == "user"]
    problem = None
    if isinstance(prompt, list) and chat[: len(prompt)] != parse_messages(prompt):
        problem = f"that does not begin with the messages of column {prompt_column!r}"
    elif isinstance(prompt, str) and prompt.strip() not in users:
        problem = f"without a user message of column {prompt_column!r} ({prompt[:40]!r})"
    if problem is not None:
        raise DataError(
            f"column {response_column!r} is a complete chat {problem}. Set data.prompt_column to "
            "another name, or correct the row"
        )
    return chat, len(prompt) if isinstance(prompt, list) else 0
