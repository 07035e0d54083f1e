"""Responses that are good or bad, each by itself.

A row is a prompt, a response and a label. KTO also needs the policy's drift whatever the prompt
(Ethayarajh et al., 2024), so every row brings its prompt with a *mismatched* response: that of the
nearest row before it with another prompt (TRL: of the row before it). The pairing is the same for
the whole run, so that the reference's log-probs are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from aligner.config import PreferenceDataConfig, PromptSourceConfig
from aligner.data.dataset import Dataset, check_section, read_items
from aligner.data.readers import Row, converted
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError

MISMATCHED = "mismatched_"  # begins the columns of prompts with mismatched responses


@dataclass(frozen=True)
class Labelled(Examples):
    """A response, whether it is desirable, and its prompt with a mismatched response."""

    example: Example
    desirable: bool
    mismatched: Example
    sequences = ("example", "mismatched")


class LabelledDataset(Dataset[Labelled]):
    """All labelled responses, in the order of their source."""

    @classmethod
    def load(
        cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: PreferenceDataConfig
    ) -> Self:
        """Read, check and tokenize; see `aligner.data.dataset.Dataset.load`."""
        check_section(data, tokenizer)
        labels: dict[int, bool] = {}

        def make(row: Row, index: int) -> Example:
            wanted = "true or false (or 1 or 0)"
            labels[index] = converted(row, data.label_column, _label, wanted)
            return make_example(row, index, tokenizer, data)

        longest = data.max_length
        examples, dropped = read_items(source, make, longest=longest, what="examples")
        rows = [
            Labelled(example, labels[example.id], _mismatched(examples, place, longest, source))
            for place, example in enumerate(examples)
        ]
        return cls(rows, dropped_too_long=dropped)


def collate_labelled(rows: Sequence[Labelled], pad_id: int) -> BatchedDataDict:
    """Columns of `collate_examples`, and of the mismatched responses with the prefix `MISMATCHED`.

    ``desirable`` float32 [B]: 1 where the response is good.
    """
    batch = collate_examples([row.example for row in rows], pad_id)
    mismatched = collate_examples([row.mismatched for row in rows], pad_id)
    batch.update({f"{MISMATCHED}{name}": column for name, column in mismatched.items()})
    batch["desirable"] = torch.tensor([float(row.desirable) for row in rows])
    return batch


def _mismatched(
    examples: Sequence[Example], place: int, longest: int | None, source: PromptSourceConfig
) -> Example:
    """The prompt at ``place`` with the nearest earlier response to another prompt that fits."""
    prompt = examples[place].prompt_ids
    for step in range(1, len(examples)):
        other = examples[place - step]  # the last rows come before the first
        start, end = other.learned[-1]
        length = len(prompt) + end - start
        if other.prompt_ids != prompt and (longest is None or length <= longest):
            ids = [*prompt, *other.ids[start:end]]
            return Example(examples[place].id, ids, [(len(prompt), len(ids))])
    raise DataError(
        f"data: {source.source}: row {examples[place].id + 1} has a prompt of {len(prompt)} "
        "tokens, and no row with another prompt has a response that fits "
        f"max_length={longest} with it; raise "
        "max_length, drop the row, or give rows with different prompts"
    )


def _label(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None
