"""Responses with a label, desirable or not.

A row is a prompt, a response and a label. KTO also estimates the policy's drift regardless of the
prompt (Ethayarajh et al., 2024). For this, every row pairs its prompt with a *mismatched* response:
the response of the nearest earlier row with another prompt (in TRL, of the previous row). The
pairing is fixed for the run, so that the reference's log-probs are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from aligner.config import PreferenceDataConfig, PromptSourceConfig
from aligner.data.dataset import Dataset, check_section, read_items
from aligner.data.readers import DataRow, converted
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError

MISMATCHED = "mismatched_"  # prefix of the columns of prompts with mismatched responses


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
        """Read, check and tokenize, see `aligner.data.dataset.Dataset.load`."""
        check_section(data, tokenizer)
        labels: dict[int, bool] = {}

        def make(row: DataRow, index: int) -> Example:
            expected = "true or false (or 1 or 0)"
            labels[index] = converted(row, data.label_column, _label, expected)
            return make_example(row, index, tokenizer, data)

        longest = data.max_length
        examples, dropped = read_items(source, make, longest=longest, noun="examples")
        rows = [
            Labelled(example, labels[example.id], _mismatched(examples, index, longest, source))
            for index, example in enumerate(examples)
        ]
        return cls(rows, dropped_too_long=dropped)


def collate_labelled(rows: Sequence[Labelled], pad_id: int) -> BatchedDataDict:
    """Collate labelled responses to a batch.

    The columns are those of `collate_examples` for the responses, and the same columns with the
    prefix `MISMATCHED` for the mismatched responses. ``desirable`` float32 [B] is 1 if the response
    is desirable, else 0.
    """
    batch = collate_examples([row.example for row in rows], pad_id)
    mismatched = collate_examples([row.mismatched for row in rows], pad_id)
    batch.update({f"{MISMATCHED}{name}": column for name, column in mismatched.items()})
    batch["desirable"] = torch.tensor([float(row.desirable) for row in rows])
    return batch


def _mismatched(
    examples: Sequence[Example], index: int, longest: int | None, source: PromptSourceConfig
) -> Example:
    """Pair the prompt at ``index`` with the nearest earlier fitting response to another prompt."""
    prompt = examples[index].prompt_ids
    for step in range(1, len(examples)):
        candidate = examples[index - step]  # the last rows precede the first
        start, end = candidate.learned[-1]
        length = len(prompt) + end - start
        if candidate.prompt_ids != prompt and (longest is None or length <= longest):
            ids = [*prompt, *candidate.ids[start:end]]
            return Example(examples[index].id, ids, [(len(prompt), len(ids))])
    raise DataError(
        f"data: {source.source}: row {examples[index].id + 1} has a prompt of {len(prompt)} "
        "tokens, and no response to another prompt fits into "
        f"max_length={longest} with it. Raise "
        "max_length, remove the row, or give rows with different prompts"
    )


def _label(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None
