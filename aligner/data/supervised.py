"""Data sets of examples: token sequences of which some tokens are learned.

A row is a prompt and its response, or a chat whose assistant messages are the responses. A response
may also be a list of chat messages: the answer only, or the complete chat. The response and its end
token are learned. The prompt, and the template's text after the end token, are not learned.
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
    """Base class of items that contain one or several `Example`, such as a preference pair."""

    sequences: ClassVar[tuple[str, ...]] = ()  # names of the fields of type `Example`

    @property
    def examples(self) -> tuple["Example", ...]:
        """Examples of the item, in the order of their rows in a batch."""
        return tuple(getattr(self, name) for name in self.sequences)

    def with_examples(self, examples: Sequence["Example"]) -> Self:
        """Return a copy of the item with these examples, in the order of `examples`."""
        return replace(self, **dict(zip(self.sequences, examples, strict=True)))

    @property
    def length(self) -> int:
        """Number of tokens of the longest example."""
        return max(example.length for example in self.examples)


@dataclass(frozen=True)
class Example(Examples):
    """One token sequence. ``id`` is the index of its row in the source, counting dropped rows.

    ``ids`` are the tokens. ``learned`` contains the (start, end) of each range of tokens in the
    loss, without ``end``. ``ref_logprobs``: the reference model's log-probs of the N learned
    tokens, float32 [N], or None.
    """

    id: int
    ids: list[int]
    learned: list[tuple[int, int]]
    ref_logprobs: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.ids)

    @property
    def examples(self) -> tuple["Example"]:
        """This example alone."""
        return (self,)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the last learned range."""
        return self.ids[: self.learned[-1][0]]

    @property
    def learned_tokens(self) -> int:
        """Number of tokens in the loss."""
        return sum(end - start for start, end in self.learned)


# Types of the section ``data``, and its keys for the column of a response.
ExampleSection = ExampleDataConfig | PairDataConfig
ResponseKey = Literal["response_column", "chosen_column", "rejected_column"]


class ExampleDataset(Dataset[Example]):
    """All examples, in the order of their source."""

    keys = ("prompt_column", "response_column")

    @classmethod
    def make(
        cls, row: DataRow, index: int, tokenizer: Tokenizer, data: ExampleDataConfig
    ) -> Example:
        """Return the example of ``row``, see `make_example`."""
        return make_example(row, index, tokenizer, data)


def make_example(
    row: DataRow,
    index: int,
    tokenizer: Tokenizer,
    data: ExampleSection,
    response_key: ResponseKey = "response_column",
) -> Example:
    """Render and tokenize one row. ``index`` becomes the example's id.

    ``response_key``: key of ``data`` that names the response column. Raises `DataError`, with
    location and columns of the row, if the row is invalid.
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
                    "which cannot include tools. Set data.chat=true, or data.tools_column=null"
                )
            prompt = take(row, data.prompt_column, str, "data.prompt_column")
            column = getattr(data, response_key)
            response = take(row, column, str, f"data.{response_key}")
            prompt = treat(prompt, location=data.prompt_column)
            response = treat(response, location=column, is_answer=True)
            ids, learned = encode_pair(tokenizer, prompt, response)
        else:
            # Chat. A system prompt, if one is prepended, counts as context, which is not learned.
            num_later = len(chat) - context
            chat = with_system(treat(chat, location="messages"), data.system_prompt)
            tools = treat(parse_tools(row.columns, data.tools_column), location="tools")
            check_all_used(tokenizer, chat, tools)
            ids, learned = encode_chat(tokenizer, chat, learn, tools, context=len(chat) - num_later)
    if data.add_bos:
        ids_with_bos = with_bos(tokenizer, ids)
        shift = len(ids_with_bos) - len(ids)
        ids, learned = ids_with_bos, [(start + shift, end + shift) for start, end in learned]
    return Example(index, ids, learned)


def encode_pair(
    tokenizer: Tokenizer, prompt: str, response: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode ``prompt + response + EOS``. Returns the ids, and the range of response and EOS.

    The range is a list with one (start, end), without ``end``. The prompt is tokenized alone, as
    when a model is prompted with it. If the response ends with a token of ``end_ids``, no EOS is
    added. Raises `DataError` if the prompt has no tokens.
    """
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        raise DataError("the prompt is empty. Remove the row, or use data.text_column")
    response_ids = encode_after(tokenizer, prompt_ids, prompt, response)
    if not response_ids or response_ids[-1] not in tokenizer.end_ids:
        response_ids = [*response_ids, tokenizer.eos_id]
    ids = [*prompt_ids, *response_ids]
    return ids, [(len(prompt_ids), len(ids))]


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode ``text + EOS``. Returns the ids, and the range of all tokens but the first.

    The first token is not learned, because no token precedes it. Range: as in `encode_pair`.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError("the text is empty. Remove the row")
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
    """Render and encode a chat. Returns the ids, and (start, end) of each learned answer.

    ``learn``: whether the last or all messages of the assistant are learned. The first ``context``
    messages are not learned. An answer starts after its generation prompt. It ends with the first
    token of ``tokenizer.end_ids``, or with the message if the template adds no end token. The last
    answer always ends with an end token. ``end`` is the index after this token.

    The generation prompt of some templates ends with a tag that finished messages lack
    (``<think>`` in R1's distillations). Then the learned text of the last message is
    ``reasoning_content`` if present, the closing tag, and ``content``.

    Raises `DataError` if a later message changes how the template renders earlier messages (then
    set ``learn=last``), if the rendered answer does not begin with its generation prompt, or if an
    answer contains an end token.
    """
    # Remove end tokens in the data, then render and encode message by message.
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
        with_answer = render(tokenizer, messages[: index + 1], tools, open_answer=False)
        is_prefix = with_answer.startswith(opening)
        if not opening.startswith(text) or not (is_prefix or index == answers[-1]):
            raise DataError(
                f"the chat template changes earlier messages when message {index} is added. Set "
                "data.learn=last"
            )
        ids += encode_after(tokenizer, ids, text, opening[len(text) :])
        answer = with_answer[len(opening) :] if is_prefix else _after_tag(opening, messages[index])
        answer_ids = encode_after(tokenizer, ids, opening, answer)
        end = next((n for n, token in enumerate(answer_ids, 1) if token in tokenizer.end_ids), None)
        learned.append((len(ids), len(ids) + (end or len(answer_ids))))
        ids += answer_ids
        text = with_answer
    # End the last answer with an end token, and cut what follows.
    start, end = learned[-1]
    if ids[end - 1] not in tokenizer.end_ids or end == start:
        ids[end:] = [tokenizer.turn_end_id]
        learned[-1] = (start, end + 1)
    return ids[: learned[-1][1]], learned


def _without_end(tokenizer: Tokenizer, message: Message, ends: Mapping[int, str]) -> Message:
    if message["role"] != "assistant":
        return message
    for end, token in ends.items():
        if token and message["content"].endswith(token) and tokenizer.encode(token) == [end]:
            return {**message, "content": message["content"].removesuffix(token)}
    return message


def _refuse_end_tokens(
    tokenizer: Tokenizer, message: Message, index: int, ends: Mapping[int, str]
) -> None:
    """Raise `DataError` if an answer contains an end token. Later tokens would not be learned."""
    parts = [message["content"], message.get("reasoning_content") or ""]
    if "tool_calls" in message:
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    for end, token in ends.items():
        if any(token in part and end in tokenizer.encode(part) for part in parts):
            raise DataError(
                f"message {index} of the chat contains the text of the end token {token!r}, where "
                "a sampled answer would end. Write the text in another way, or remove the row"
            )


def _after_tag(opening: str, message: Message) -> str:
    """Return the answer's text after ``opening``, a generation prompt that must end with a tag."""
    tag = opened_tag(opening)
    if tag is None:
        raise DataError(
            f"the chat template's generation prompt ends with {opening[-40:]!r}, but the template "
            "renders finished messages without this text. Training and sampling would use "
            "different formats. Correct the template, or use plain-text prompts"
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
    the examples have ``ref_logprobs``, they are a column float32 [B, S], 0 at tokens not learned.
    """
    ids, lengths = pad_right([example.ids for example in examples], pad_id)
    # Set the mask of learned tokens to 1.
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
    """Return a text with the number of learned tokens, which it marks in the first example."""
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
    """Return messages (None for plain text), learn and context, as `encode_chat` takes them."""
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
    """Return the chat of a prompt and its answers, and the number of messages of the prompt."""
    first = response[0] if response else None
    if isinstance(first, Mapping) and first.get("role") == "assistant":
        if not isinstance(prompt, str | list):
            raise DataError(
                f"column {response_column!r} begins with the assistant's message, so column "
                f"{prompt_column!r} must contain the prompt. Set data.prompt_column to the column "
                "of the prompt"
            )
        messages = parse_messages(prompt)
        return parse_conversation([*messages, *response]), len(messages)
    # If the row has a prompt, a complete chat must contain it.
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
            "another column, or correct the row"
        )
    return chat, len(prompt) if isinstance(prompt, list) else 0
