"""Responses that are good or bad, each by itself.

A row is a prompt, a response and a label. KTO also asks how far the policy has drifted whatever the
prompt (Ethayarajh et al., 2024), so every row brings its prompt with a *foreign* response: that of
the nearest row before it with another prompt (TRL: the row before it; which row, is the same for
the whole run, so that the reference need be asked once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.data.dataset import Dataset, read_items
from aligner.data.readers import Row, Source
from aligner.data.supervised import (
    Example,
    ExampleFormat,
    check_format,
    collate_examples,
    make_example,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError

FOREIGN = "foreign_"  # begins the columns of prompts with foreign responses


@dataclass(frozen=True)
class Labelled:
    """A response, whether it is desirable, and its prompt with a foreign response."""

    example: Example
    desirable: bool
    foreign: Example

    @property
    def length(self) -> int:
        """Tokens of the longer sequence."""
        return max(self.example.length, self.foreign.length)

    @property
    def examples(self) -> tuple[Example, Example]:
        """The response and the foreign one."""
        return self.example, self.foreign

    def with_examples(self, examples: Sequence[Example]) -> "Labelled":
        """The same label of two other examples."""
        example, foreign = examples
        return replace(self, example=example, foreign=foreign)


class LabelledDataset(Dataset[Labelled]):
    """All labelled responses, in the order of their source."""

    @classmethod
    def load(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        example_format: ExampleFormat,
        label_column: str = "label",
        *,
        arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> "LabelledDataset":
        """Read, check and tokenize; see `aligner.data.supervised.ExampleDataset.load`."""
        check_format(example_format, tokenizer)
        labels: dict[int, bool] = {}

        def make(row: Row, index: int) -> Example:
            labels[index] = _label(row, label_column)
            return make_example(row, index, tokenizer, example_format)

        longest = example_format.max_length
        examples, dropped = read_items(
            source, make, longest=longest, what="examples", arguments=arguments, limit=limit
        )
        rows = [
            Labelled(example, labels[example.id], _foreign(examples, place, longest, source))
            for place, example in enumerate(examples)
        ]
        return cls(rows, dropped_too_long=dropped)


def collate_labelled(rows: Sequence[Labelled], pad_id: int) -> BatchedDataDict:
    """Columns of `collate_examples`, and the same of the foreign responses with `FOREIGN` before.

    ``desirable`` float32 [B]: 1 where the response is good.
    """
    batch = collate_examples([row.example for row in rows], pad_id)
    foreign = collate_examples([row.foreign for row in rows], pad_id)
    batch.update({f"{FOREIGN}{name}": column for name, column in foreign.items()})
    batch["desirable"] = torch.tensor([float(row.desirable) for row in rows])
    return batch


def _foreign(
    examples: Sequence[Example], place: int, longest: int | None, source: Source
) -> Example:
    """The prompt at ``place`` with the nearest earlier response to another prompt that fits."""
    prompt = _prompt(examples[place])
    for step in range(1, len(examples)):
        other = examples[place - step]  # the last rows come before the first
        start, end = other.learned[-1]
        length = len(prompt) + end - start
        if _prompt(other) != prompt and (longest is None or length <= longest):
            ids = [*prompt, *other.ids[start:end]]
            return Example(examples[place].id, ids, [(len(prompt), len(ids))])
    raise DataError(
        f"data: {source}: row {examples[place].id + 1} has a prompt of {len(prompt)} tokens, and "
        f"no row with another prompt has a response that fits max_length={longest} with it; raise "
        "max_length, drop the row, or give rows with different prompts"
    )


def _prompt(example: Example) -> list[int]:
    return example.ids[: example.learned[-1][0]]


def _label(row: Row, column: str) -> bool:
    value = row.columns.get(column)
    if not isinstance(value, bool | int) or value not in (0, 1):
        found = "missing" if value is None else f"{value!r} ({type(value).__name__})"
        raise DataError(
            f"{row.place}: column {column!r} must be true or false (or 1 or 0), it is {found}; "
            f"columns found: {sorted(row.columns)}"
        )
    return bool(value)
