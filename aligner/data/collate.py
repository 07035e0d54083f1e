"""Right-padded batches. Padding is recognised by lengths, never by ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.data.prompts import Prompt


@dataclass(frozen=True)
class PromptBatch:
    """``B`` prompts: tensors for the model, lists for the reward function."""

    input_ids: Tensor  # int64 [B, P], right-padded
    input_lengths: Tensor  # int64 [B], tokens that count
    prompt_ids: Tensor  # int64 [B], which prompt of the data set
    texts: list[str]
    ground_truths: list[Any]
    columns: dict[str, list[Any]]  # column → B values, None where a row lacks it

    def __len__(self) -> int:
        return len(self.texts)


def pad_right(
    sequences: Sequence[Sequence[int]], pad_id: int, *, pad_to_multiple_of: int = 1
) -> tuple[Tensor, Tensor]:
    """Stack token lists into ``(ids int64 [B, P], lengths int64 [B])``.

    ``P`` is the longest length rounded up to a multiple of ``pad_to_multiple_of``.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    longest = int(lengths.max()) if len(sequences) else 0
    width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return ids, lengths


def collate_prompts(
    prompts: Sequence[Prompt], pad_id: int, *, pad_to_multiple_of: int = 1
) -> PromptBatch:
    """Make one batch of ``prompts``, in their order."""
    input_ids, input_lengths = pad_right(
        [prompt.ids for prompt in prompts], pad_id, pad_to_multiple_of=pad_to_multiple_of
    )
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return PromptBatch(
        input_ids=input_ids,
        input_lengths=input_lengths,
        prompt_ids=torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64),
        texts=[prompt.text for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        columns={name: [prompt.columns.get(name) for prompt in prompts] for name in names},
    )
