"""Preference pairs: two responses to one prompt, of which one is better.

A row is a prompt with a chosen and a rejected response, and perhaps the reward of each. The
responses are text, or lists of chat messages: the assistant's only, or the whole chat, and then
the prompt may be missing or stand beside it. In a batch the two sequences of a pair are adjacent
rows, the chosen one first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.data.dataset import Dataset, read_items
from aligner.data.readers import Row, Source, finite_number
from aligner.data.supervised import (
    Example,
    ExampleFormat,
    check_format,
    collate_examples,
    make_example,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError


@dataclass(frozen=True)
class Pair:
    """Two examples of one prompt. ``rewards``: of chosen and rejected; 1 and 0 if unknown."""

    chosen: Example
    rejected: Example
    rewards: tuple[float, float] = (1.0, 0.0)

    @property
    def length(self) -> int:
        """Tokens of the longer sequence."""
        return max(self.chosen.length, self.rejected.length)

    @property
    def examples(self) -> tuple[Example, Example]:
        """The two, chosen first."""
        return self.chosen, self.rejected

    def with_examples(self, examples: Sequence[Example]) -> "Pair":
        """The same pair out of two other examples."""
        chosen, rejected = examples
        return replace(self, chosen=chosen, rejected=rejected)


@dataclass(frozen=True)
class PairFormat:
    """Format by which a row becomes a pair."""

    prompt_column: str = "prompt"  # text, or a list of chat messages
    chosen_column: str = "chosen"  # text, or the assistant's message, or a whole chat
    rejected_column: str = "rejected"  # the same
    chosen_reward_column: str | None = None  # a number; None: the data has none
    rejected_reward_column: str | None = None
    rewards_in_order: bool = False  # refuse rows whose chosen response has the lower reward
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; None: none
    chat: bool = False  # a plain-text prompt becomes a user message; messages always use a template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    max_length: int | None = None  # in tokens; pairs with a longer sequence are dropped and counted

    def example_format(self, response_column: str) -> ExampleFormat:
        """Format of one of the two sequences."""
        return ExampleFormat(
            prompt_column=self.prompt_column,
            response_column=response_column,
            response_key=f"data.{'chosen' if response_column == self.chosen_column else 'rejected'}"
            "_column",
            tools_column=self.tools_column,
            chat=self.chat,
            system_prompt=self.system_prompt,
            add_bos=self.add_bos,
            max_length=self.max_length,
        )


class PairDataset(Dataset[Pair]):
    """All pairs, in the order of their source."""

    @classmethod
    def load(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        pair_format: PairFormat | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> "PairDataset":
        """Read, check and tokenize; see `aligner.data.supervised.ExampleDataset.load`."""
        pair_format = pair_format or PairFormat()
        check_format(pair_format.example_format(pair_format.chosen_column), tokenizer)
        pairs, dropped = read_items(
            source,
            lambda row, index: make_pair(row, index, tokenizer, pair_format),
            longest=pair_format.max_length,
            what="pairs",
            arguments=arguments,
            limit=limit,
        )
        return cls(pairs, dropped_too_long=dropped)


def make_pair(row: Row, index: int, tokenizer: Tokenizer, pair_format: PairFormat) -> Pair:
    """Turn one row into a pair; errors name its place and content."""
    chosen, rejected = (
        make_example(row, index, tokenizer, pair_format.example_format(column))
        for column in (pair_format.chosen_column, pair_format.rejected_column)
    )
    if _asked(chosen) != _asked(rejected):
        raise DataError(
            f"{row.place}: the chats of columns {pair_format.chosen_column!r} and "
            f"{pair_format.rejected_column!r} differ before their last message; a preference is "
            "between two answers to the same messages"
        )
    if chosen.ids == rejected.ids:
        raise DataError(
            f"{row.place}: the chosen and the rejected response are the same; remove the row"
        )
    rewards = (
        _reward(row, pair_format.chosen_reward_column, 1.0),
        _reward(row, pair_format.rejected_reward_column, 0.0),
    )
    if pair_format.rewards_in_order and rewards[0] < rewards[1]:
        raise DataError(
            f"{row.place}: the chosen response has the reward {rewards[0]:g} "
            f"({pair_format.chosen_reward_column!r}) and the rejected one {rewards[1]:g} "
            f"({pair_format.rejected_reward_column!r}); swap the columns or remove the row: a "
            "preference of negative strength would be learned the wrong way round"
        )
    return Pair(chosen, rejected, rewards)


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> BatchedDataDict:
    """Columns of `collate_examples` with 2 rows for each pair, chosen before rejected.

    ``ground_truth_rewards`` float32 [B]: the reward of each row. ``preference_strengths`` float32
    [B]: by how much the chosen response of the row's pair is better.
    """
    batch = collate_examples([example for pair in pairs for example in pair.examples], pad_id)
    rewards = torch.tensor([pair.rewards for pair in pairs])
    batch["ground_truth_rewards"] = rewards.flatten()
    batch["preference_strengths"] = (rewards[:, 0] - rewards[:, 1]).repeat_interleave(2)
    return batch


def _asked(example: Example) -> list[int]:
    return example.ids[: example.learned[-1][0]]


def _reward(row: Row, column: str | None, default: float) -> float:
    if column is None:
        return default
    value = row.columns.get(column)
    number = finite_number(value)
    if number is None:
        found = "missing" if value is None else f"{value!r:.60} ({type(value).__name__})"
        raise DataError(
            f"{row.place}: column {column!r} must be a finite number, it is {found}; columns "
            f"found: {sorted(row.columns)}"
        )
    return number
