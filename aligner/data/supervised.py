"""Worked examples: sequences of which some tokens are to be learned.

A row is a prompt and its response, or a chat whose assistant messages are the responses. A response
may itself be a list of chat messages: the assistant's only, or the whole chat. The response and the
token that ends it are learned, so that a model which learned it also stops; never the prompt, and
never the text that a chat template puts behind the end.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from aligner.config import ExampleDataConfig, PairDataConfig
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
from aligner.data.prompts import check_plain_text, pad_right
from aligner.data.readers import Row, take
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.data.tokenizers.tokenizer import encode_after as _encode_after
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


@dataclass(frozen=True)
class Examples:
    """An item of some sequences: pairs, labelled and rated responses, and examples themselves."""

    sequences: ClassVar[tuple[str, ...]] = ()  # names of the fields that hold them

    @property
    def examples(self) -> tuple["Example", ...]:
        """Its sequences, in the order of a batch."""
        return tuple(getattr(self, name) for name in self.sequences)

    def with_examples(self, examples: Sequence["Example"]) -> Self:
        """The same item of other sequences."""
        return replace(self, **dict(zip(self.sequences, examples, strict=True)))

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(example.length for example in self.examples)


@dataclass(frozen=True)
class Example(Examples):
    """One sequence. ``id`` is its place in the source, counted before any was dropped."""

    id: int
    ids: list[int]
    learned: list[tuple[int, int]]  # [start, end) of the tokens that the loss speaks of
    ref_logprobs: Tensor | None = None  # float32 [N] of the N learned tokens, if known

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.ids)

    @property
    def examples(self) -> tuple["Example"]:
        """The example itself."""
        return (self,)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the last response."""
        return self.ids[: self.learned[-1][0]]

    @property
    def learned_tokens(self) -> int:
        """Number of tokens that enter the loss."""
        return sum(end - start for start, end in self.learned)


# Sections that say how a row becomes an example, and their keys that name a response's column.
ExampleSection = ExampleDataConfig | PairDataConfig
ResponseKey = Literal["response_column", "chosen_column", "rejected_column"]


class ExampleDataset(Dataset[Example]):
    """All examples, in the order of their source."""

    @classmethod
    def make(cls, row: Row, index: int, tokenizer: Tokenizer, data: ExampleDataConfig) -> Example:
        """See `make_example`."""
        return make_example(row, index, tokenizer, data)


def make_example(
    row: Row,
    index: int,
    tokenizer: Tokenizer,
    data: ExampleSection,
    response_key: ResponseKey = "response_column",
) -> Example:
    """Turn one row into an example; errors name its place and content.

    ``response_key``: the key of ``data`` that names the column of the response.
    """
    treat = partial(treat_special_tokens, tokenizer, policy=data.special_tokens_in_text)
    try:
        chat, learn, context = _conversation(row, data, response_key)
        if chat is None:
            check_plain_text(data)
            if row.columns.get(data.tools_column or ""):
                raise DataError(
                    f"column {data.tools_column!r} holds tools, but the row is plain text and has "
                    "no place for them; set data.chat=true, or data.tools_column=null"
                )
            prompt = take(row, data.prompt_column, str, "data.prompt_column")
            column = getattr(data, response_key)
            response = take(row, column, str, f"data.{response_key}")
            prompt = treat(prompt, place=data.prompt_column)
            response = treat(response, place=column, is_answer=True)
            ids, learned = encode_pair(tokenizer, prompt, response)
        else:
            later = len(chat) - context
            chat = with_system(treat(chat, place="messages"), data.system_prompt)
            tools = treat(parse_tools(row.columns, data.tools_column), place="tools")
            check_all_used(tokenizer, chat, tools)
            context = len(chat) - later
            ids, learned = encode_chat(tokenizer, chat, learn, tools, context=context)
    except DataError as error:
        raise DataError(f"{row.place}: {error}; columns found: {sorted(row.columns)}") from error
    if data.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
        learned = [(start + 1, end + 1) for start, end in learned]
    return Example(index, ids, learned)


def encode_pair(
    tokenizer: Tokenizer, prompt: str, response: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode ``prompt + response + EOS``; return the ids and the span of the response.

    The prompt keeps the tokens it has on its own, for those are what a model is prompted with. A
    response that already ends with a token of ``end_ids`` gets no EOS.
    """
    before = tokenizer.encode(prompt)
    if not before:
        raise DataError("the prompt is empty: it has no token")
    after = _encode_after(tokenizer, before, prompt, response)
    if not after or after[-1] not in tokenizer.end_ids:
        after = [*after, tokenizer.eos_id]
    return [*before, *after], [(len(before), len(before) + len(after))]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    learn: Literal["last", "all"] = "all",
    tools: Tools | None = None,
    *,
    context: int = 0,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a chat in the tokenizer's template, and the spans of the assistant's messages.

    The first ``context`` messages are not learned. An end token at the end of an assistant's text
    is left to the template.

    A span begins behind the template's opening of the message and ends with the token that ends
    it: the first of the tokenizer's ``end_ids`` if the template has one there, else the message's
    last; the last message always gets one.

    Some templates open an answer with a tag that they leave out of finished messages (``<think>``
    in R1's distillations). What is learned of the last message is then its own text behind that
    opening: ``reasoning_content``, if it has that, the closing tag, ``content``. Content that has
    no closing tag is an answer without reasoning: the tag is closed before it.

    Raises:
        DataError: the template does not keep what came before a message as it was (some drop
            earlier reasoning); learn the last message only. Or its opening has no place before
            the answer. Or an answer spells an end token before its end.
    """
    ends = {end: tokenizer.decode([end]) for end in tokenizer.end_ids}
    messages = [_without_end(tokenizer, message, ends) for message in messages]
    answers = [
        n for n, message in enumerate(messages) if message["role"] == "assistant" and n >= context
    ]
    text = ""
    ids: list[int] = []
    learned: list[tuple[int, int]] = []
    for number in answers if learn == "all" else answers[-1:]:
        _refuse_end_tokens(tokenizer, messages[number], number, ends)
        opening = render(tokenizer, messages[:number], tools)
        closed = render(tokenizer, messages[: number + 1], tools, open_answer=False)
        is_kept = closed.startswith(opening)
        if not opening.startswith(text) or not (is_kept or number == answers[-1]):
            raise DataError(
                f"the chat template changes earlier messages when message {number} is added; set "
                "learn=last"
            )
        ids += _encode_after(tokenizer, ids, text, opening[len(text) :])
        more = closed[len(opening) :] if is_kept else _behind_tag(opening, messages[number])
        answer = _encode_after(tokenizer, ids, opening, more)
        end = next((n for n, token in enumerate(answer, 1) if token in tokenizer.end_ids), None)
        learned.append((len(ids), len(ids) + (end or len(answer))))
        ids += answer
        text = closed
    start, end = learned[-1]
    if ids[end - 1] not in tokenizer.end_ids or end == start:
        ids[end:] = [tokenizer.turn_end_id]
        learned[-1] = (start, end + 1)
    return ids[: learned[-1][1]], learned


def _without_end(tokenizer: Tokenizer, message: Message, ends: Mapping[int, str]) -> Message:
    """Return an assistant's message without the end token that its content ends with."""
    if message["role"] != "assistant":
        return message
    for end, token in ends.items():
        if token and message["content"].endswith(token) and tokenizer.encode(token) == [end]:
            return {**message, "content": message["content"].removesuffix(token)}
    return message


def _refuse_end_tokens(
    tokenizer: Tokenizer, message: Message, number: int, ends: Mapping[int, str]
) -> None:
    """Refuse an answer that spells an end token: what follows the token would not be learned."""
    parts = [message["content"], message.get("reasoning_content") or ""]
    if "tool_calls" in message:
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    for end, token in ends.items():
        if any(token in part and end in tokenizer.encode(part) for part in parts):
            raise DataError(
                f"message {number} of the chat spells the end token {token!r}, at which an answer "
                "ends; write it in another way, or remove the row"
            )


def _behind_tag(opening: str, message: Message) -> str:
    """A message's own text behind an opening that ends with a tag."""
    tag = opened_tag(opening)
    if tag is None:
        raise DataError(
            f"the chat template opens an answer with {opening[-40:]!r}, and finished messages do "
            "not begin so: a model's prompt and the text it would learn do not fit; use "
            "plain-text prompts"
        )
    closing, content = f"</{tag[1:]}", message["content"]
    if message.get("reasoning_content") is not None:
        return f"{message['reasoning_content'].strip()}\n{closing}\n\n{content}"
    if closing not in content:
        return f"\n{closing}\n\n{content}"
    bare: str = content.lstrip()
    return bare.removeprefix(tag).lstrip("\n") if bare.startswith(tag) else content


def collate_examples(examples: Sequence[Example], pad_id: int) -> BatchedDataDict:
    """``input_ids`` int64 [B, S] right-padded, ``input_lengths`` int64 [B], ``token_mask`` float32
    [B, S] (1 where the token is learned), ``sample_mask`` float32 [B] (all 1); where the examples
    bring them, ``ref_logprobs`` float32 [B, S], 0 where the mask is.
    """
    ids, lengths = pad_right([example.ids for example in examples], pad_id)
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
    references = [each.ref_logprobs for each in examples if each.ref_logprobs is not None]
    if references:
        assert len(references) == len(examples), "some examples lack ref_logprobs"
        batch["ref_logprobs"] = torch.zeros(ids.shape).masked_scatter_(
            mask.bool(), torch.cat(references)
        )
    return batch


def response_note(examples: Iterable[Example], tokenizer: Tokenizer) -> str:
    """Count the tokens of responses, and show the end of the first example with its mask."""
    examples = list(examples)
    learned = sum(example.learned_tokens for example in examples)
    tokens = sum(example.length for example in examples)
    ids, shown, position = examples[0].ids, "", 0
    for start, end in examples[0].learned:
        shown += f"{tokenizer.decode(ids[position:start])}⟦{tokenizer.decode(ids[start:end])}⟧"
        position = end
    shown = shown if len(shown) <= 240 else f"…{shown[-240:]}"
    return (
        f"{learned:,} of {tokens:,} tokens belong to responses; the first example, with "
        f"its responses between ⟦ and ⟧: {shown!r}"
    )


def _conversation(
    row: Row, data: ExampleSection, response_key: ResponseKey
) -> tuple[list[Message] | None, Literal["last", "all"], int]:
    """Return a row's chat, which answers are learned, and the number of messages before them.

    The chat is None for a row of plain text.
    """
    learn = data.learn if isinstance(data, ExampleDataConfig) else "last"
    if isinstance(data, ExampleDataConfig) and data.messages_column is not None:
        chat = take(row, data.messages_column, list, "data.messages_column")
        return parse_conversation(chat), learn, 0
    column = getattr(data, response_key)
    is_chat = isinstance(data, ExampleDataConfig) and isinstance(row.columns.get("messages"), list)
    if is_chat and row.columns.get(column) is None:
        raise DataError(
            f"column {column!r} is missing, and column 'messages' holds a list; set "
            "data.messages_column=messages if it is the chat to learn"
        )
    response = take(row, column, (str, list), f"data.{response_key}")
    prompt = row.columns.get(data.prompt_column)
    if isinstance(response, list):
        chat, context = _answered(prompt, response, data.prompt_column, column)
        return chat, learn, context
    prompt = take(row, data.prompt_column, (str, list), "data.prompt_column")
    if isinstance(prompt, str) and not data.chat:
        return None, "last", 0
    return [*_asked(prompt), {"role": "assistant", "content": response}], "last", 0


def _answered(
    prompt: Any, response: list[Any], prompt_column: str, response_column: str
) -> tuple[list[Message], int]:
    """Return the chat of a response that is a list of messages, and the length of its prompt.

    The list is the answer to the prompt, or the whole chat. The length is in messages.
    """
    first = response[0] if response else None
    if isinstance(first, Mapping) and first.get("role") == "assistant":
        if not isinstance(prompt, str | list):
            raise DataError(
                f"column {response_column!r} begins with the assistant's message, so column "
                f"{prompt_column!r} must hold what it answers; name it with "
                "data.prompt_column"
            )
        messages = _asked(prompt)
        return parse_conversation([*messages, *response]), len(messages)
    chat = parse_conversation(response)
    users = [message["content"].strip() for message in chat if message["role"] == "user"]
    problem = None
    if isinstance(prompt, list) and chat[: len(prompt)] != _asked(prompt):
        problem = f"that does not begin with the messages of column {prompt_column!r}"
    elif isinstance(prompt, str) and prompt.strip() not in users:
        holds = f"column {prompt_column!r} holds ({prompt[:40]!r})"
        problem = f"in which no user says what {holds}"
    if problem is not None:
        raise DataError(
            f"column {response_column!r} is a whole chat {problem}; set data.prompt_column to "
            "another name, or correct the row"
        )
    return chat, len(prompt) if isinstance(prompt, list) else 0


def _asked(prompt: str | list[Any]) -> list[Message]:
    return parse_messages(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
