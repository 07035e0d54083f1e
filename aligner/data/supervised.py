"""Worked examples: sequences of which some tokens are to be learned.

A row is a prompt and its response, or a chat whose assistant messages are the responses. What is
learned is the response and the token that ends it, so that a model which learned it also stops;
never the prompt, and never what a chat template puts behind the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from aligner.data.chat import Message, parse_conversation, parse_messages
from aligner.data.collate import pad_right
from aligner.data.dataset import Dataset, read_items
from aligner.data.readers import Row, Source
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, DataError, TokenizerError


@dataclass(frozen=True)
class Example:
    """One sequence. ``id`` is its place in the source, counted before any was dropped."""

    id: int
    ids: list[int]
    learned: list[tuple[int, int]]  # [start, end) of the tokens that the loss speaks of
    ref_logprobs: Tensor | None = None  # float32, of the learned tokens; None: nobody asked

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.ids)

    @property
    def learned_tokens(self) -> int:
        """How many tokens the loss speaks of."""
        return sum(end - start for start, end in self.learned)


@dataclass(frozen=True)
class ExampleFormat:
    """How a row becomes an example."""

    prompt_column: str = "prompt"  # text, or a list of chat messages
    response_column: str = "response"  # text
    messages_column: str | None = None  # a whole chat instead of the two columns above
    chat: bool = False  # a plain-text prompt becomes a user message; messages always use a template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    learn: Literal["last", "all"] = "all"  # which assistant messages of a chat are learned
    max_length: int | None = None  # in tokens; longer examples are dropped and counted


class ExampleDataset(Dataset[Example]):
    """All examples, in the order of their source."""

    @classmethod
    def load(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        example_format: ExampleFormat | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> "ExampleDataset":
        """Read, check and tokenize; arguments as of `aligner.data.prompts.PromptDataset.load`.

        Raises:
            DataError: no rows, a bad row (with its place and the columns found), or nothing left
                after dropping what is too long.
        """
        example_format = example_format or ExampleFormat()
        check_format(example_format, tokenizer)
        examples, dropped = read_items(
            source,
            lambda row, index: make_example(row, index, tokenizer, example_format),
            longest=example_format.max_length,
            what="examples",
            arguments=arguments,
            limit=limit,
        )
        return cls(examples, dropped_too_long=dropped)


def make_example(
    row: Row, index: int, tokenizer: Tokenizer, example_format: ExampleFormat
) -> Example:
    """Turn one row into an example; a refusal says where the row stands and what it holds."""
    try:
        if example_format.messages_column is not None:
            chat = parse_conversation(_take(row, example_format.messages_column, list))
            ids, learned = encode_chat(
                tokenizer, _with_system(chat, example_format), example_format.learn
            )
        else:
            ids, learned = _prompt_and_response(row, tokenizer, example_format)
    except DataError as error:
        raise DataError(f"{row.place}: {error}; columns found: {sorted(row.columns)}") from error
    if example_format.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
        learned = [(start + 1, end + 1) for start, end in learned]
    return Example(index, ids, learned)


def encode_pair(
    tokenizer: Tokenizer, prompt: str, response: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of ``prompt + response + EOS`` and the span of the response.

    The prompt keeps the tokens it has on its own, for those are what a model is asked with.
    """
    before = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + response)
    # Where a token reaches over the border, the response is encoded by itself.
    fits = whole[: len(before)] == before
    after = whole[len(before) :] if fits else tokenizer.encode(response)
    if not before:
        raise DataError("the prompt is empty: it has no token")
    ids = [*before, *after, tokenizer.eos_id]
    return ids, [(len(before), len(ids))]


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], learn: Literal["last", "all"] = "all"
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a chat in the tokenizer's template, and the spans of the assistant's messages.

    A span begins behind the template's opening of the message and ends with the token that ends
    it: the tokenizer's EOS if the template has it there, else the message's last; the last message
    always gets an EOS.

    Raises:
        DataError: the template does not keep what came before a message as it was (some drop
            earlier reasoning); learn the last message only.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    text, ids, learned = "", [], []
    for number in answers if learn == "all" else answers[-1:]:
        opening = tokenizer.apply_chat_template(messages[:number])
        closed = tokenizer.apply_chat_template(messages[: number + 1], add_generation_prompt=False)
        if not (opening.startswith(text) and closed.startswith(opening)):
            raise DataError(
                f"the chat template changes earlier messages when message {number} is added; set "
                "learn=last"
            )
        ids += tokenizer.encode(opening[len(text) :])
        answer = tokenizer.encode(closed[len(opening) :])
        end = _end_of_answer(answer, tokenizer.eos_id)
        learned.append((len(ids), len(ids) + end))
        ids += answer
        text = closed
    start, end = learned[-1]
    if ids[end - 1] != tokenizer.eos_id:
        ids[end:] = [tokenizer.eos_id]
        learned[-1] = (start, end + 1)
    return ids[: learned[-1][1]], learned


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


def _prompt_and_response(
    row: Row, tokenizer: Tokenizer, example_format: ExampleFormat
) -> tuple[list[int], list[tuple[int, int]]]:
    prompt = _take(row, example_format.prompt_column, (str, list))
    response = _take(row, example_format.response_column, str)
    if isinstance(prompt, str) and not example_format.chat:
        return encode_pair(tokenizer, prompt, response)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*parse_messages(asked), {"role": "assistant", "content": response}]
    return encode_chat(tokenizer, _with_system(messages, example_format), "last")


def _with_system(messages: list[Message], example_format: ExampleFormat) -> list[Message]:
    system = example_format.system_prompt
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _end_of_answer(answer: Sequence[int], eos_id: int) -> int:
    """Tokens of an answer up to its EOS, that included; all of them where it has none."""
    return answer.index(eos_id) + 1 if eos_id in answer else len(answer)


def _take(row: Row, name: str, kind: type | tuple[type, ...]) -> Any:
    value = row.columns.get(name)
    if value is None:
        raise DataError(f"column {name!r} is {'null' if name in row.columns else 'missing'}")
    if not isinstance(value, kind):
        names: dict[Any, str] = {str: "text", list: "a list of chat messages"}
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(names[each] for each in kinds)
        raise DataError(f"column {name!r} must be {wanted}, got {type(value).__name__}")
    return value


def check_format(example_format: ExampleFormat, tokenizer: Tokenizer) -> None:
    """Refuse a format that no row can have."""
    if example_format.max_length is not None and example_format.max_length < 2:
        raise ConfigError(
            f"data: max_length={example_format.max_length} must be at least 2 tokens, a prompt's "
            "and a response's"
        )
    if example_format.add_bos and tokenizer.bos_id is None:
        raise TokenizerError("data: add_bos=true but the tokenizer has no BOS token")
