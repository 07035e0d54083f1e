"""Rated responses: sequences with a number for each of some attributes, which may be missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional

from aligner.config import PromptSourceConfig, RewardDataConfig
from aligner.data.dataset import Dataset, read_items
from aligner.data.readers import Row, finite_number
from aligner.data.supervised import Example, check_section, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


@dataclass(frozen=True)
class Rated:
    """One sequence and its ratings; None: this attribute was not rated."""

    example: Example
    ratings: tuple[float | None, ...]

    @property
    def examples(self) -> tuple[Example]:
        """The sequence, as pairs give theirs."""
        return (self.example,)

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.example.length


class RatedDataset(Dataset[Rated]):
    """All rated responses, in the order of their source."""

    @classmethod
    def load(cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: RewardDataConfig) -> Self:
        """Read, check and tokenize; see `aligner.data.dataset.Dataset.load`.

        ``data.attribute_columns``: each holds a number, or null where it was not rated. A row
        without any rating is refused.
        """
        check_section(data, tokenizer)
        rated, dropped = read_items(
            source,
            lambda row, index: Rated(
                make_example(row, index, tokenizer, data),
                _ratings(row, data.attribute_columns),
            ),
            longest=data.max_length,
            what="rated responses",
        )
        return cls(rated, dropped_too_long=dropped)


def collate_rated(rated: Sequence[Rated], pad_id: int) -> BatchedDataDict:
    """Columns of `collate_examples`, ``attributes`` float32 [B, K] (0 where there is no rating) and
    ``attribute_mask`` float32 [B, K] (1: rated).

    The batch is wider than K, for columns as wide as the sequences are taken for one number a
    token.
    """
    batch = collate_examples([row.example for row in rated], pad_id)
    known = [[rating is not None for rating in row.ratings] for row in rated]
    batch["attributes"] = torch.tensor([[rating or 0.0 for rating in row.ratings] for row in rated])
    batch["attribute_mask"] = torch.tensor(known).float()
    missing = batch["attributes"].shape[1] + 1 - batch["input_ids"].shape[1]
    if missing > 0:
        batch["input_ids"] = functional.pad(batch["input_ids"], (0, missing), value=pad_id)
        batch["token_mask"] = functional.pad(batch["token_mask"], (0, missing))
    return batch


def _ratings(row: Row, columns: Sequence[str]) -> tuple[float | None, ...]:
    ratings = tuple(_rating(row, column) for column in columns)
    if all(rating is None for rating in ratings):
        raise DataError(
            f"{row.place}: none of the columns {list(columns)} holds a rating; name the right ones "
            f"(data.attribute_columns) or remove the row. Columns found: {sorted(row.columns)}"
        )
    return ratings


def _rating(row: Row, column: str) -> float | None:
    value = row.columns.get(column)
    if value is None:
        return None
    number = finite_number(value)
    if number is None:
        raise DataError(
            f"{row.place}: column {column!r} must be a finite number or null, it is {value!r:.60}"
        )
    return number
