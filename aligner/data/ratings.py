"""Rated responses: sequences with optional ratings of several attributes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from aligner.config import RewardDataConfig
from aligner.data.dataset import Dataset
from aligner.data.readers import DataRow, converted, finite_number
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


@dataclass(frozen=True)
class Rated(Examples):
    """Sequence with its ratings. The rating of an attribute is None if it is unknown."""

    example: Example
    ratings: tuple[float | None, ...]
    sequences = ("example",)


class RatedDataset(Dataset[Rated]):
    """All rated responses, in the order of their source.

    Each of ``data.attribute_columns`` contains a number, or null without a rating. A row without
    any rating is refused.
    """

    noun = "rated responses"

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: RewardDataConfig) -> Rated:
        """See `aligner.data.dataset.Dataset.make`."""
        example, columns = make_example(row, index, tokenizer, data), data.attribute_columns
        ratings = tuple(
            None
            if row.columns.get(column) is None
            else converted(row, column, finite_number, "a finite number or null")
            for column in columns
        )
        if all(rating is None for rating in ratings):
            raise DataError(
                f"{row.location}: none of the columns {list(columns)} contains a rating. Name the "
                "columns with ratings (data.attribute_columns) or remove the row. Columns found: "
                f"{sorted(row.columns)}"
            )
        return Rated(example, ratings)


def collate_rated(rated: Sequence[Rated], pad_id: int) -> BatchedDataDict:
    """Return `collate_examples` with ratings.

    ``attributes``: float32 [B, K], 0 without a rating. ``attribute_mask``: float32 [B, K], 1 with a
    rating. Sequences are padded to more than K tokens, because a column as wide as the sequences
    is treated as one value per token.
    """
    batch = collate_examples([row.example for row in rated], pad_id)
    is_rated = [[rating is not None for rating in row.ratings] for row in rated]
    batch["attributes"] = torch.tensor([[rating or 0.0 for rating in row.ratings] for row in rated])
    batch["attribute_mask"] = torch.tensor(is_rated).float()
    missing = batch["attributes"].shape[1] + 1 - batch["input_ids"].shape[1]
    if missing > 0:
        batch["input_ids"] = functional.pad(batch["input_ids"], (0, missing), value=pad_id)
        batch["token_mask"] = functional.pad(batch["token_mask"], (0, missing))
    return batch
