"""A scoring pass that training goes on with.

Where a rollout is one micro-batch of one update, the critic's values and the first forward pass of
its training read the same rows with the same weights. Then the values' pass keeps its graph:

    get_values ─► hidden states with their graph ─► values
                              │
    training_update ──────────┴─► loss ─► backward
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aligner.models.gpt.forward.schedule import Microbatch


class ForwardReuse:
    """Hidden states of a scoring pass over one micro-batch, with their graph, for one update."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: makes the passes; none is there yet."""
        self._model = model
        self._microbatch: Microbatch | None = None
        self._versions: list[int] = []

    def keep(self, microbatch: Microbatch, hidden: Tensor) -> None:
        """Keep ``hidden`` float [n, L, H], which ``model`` made of ``microbatch``."""
        self._microbatch = dataclasses.replace(microbatch, hidden=hidden)
        self._versions = self._weight_versions()

    def drop(self) -> None:
        """Free the graph."""
        self._microbatch = None

    def take(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """``microbatches``, with hidden states where these are the rows that were scored.

        Whatever they are, nothing is left afterwards.
        """
        kept, self._microbatch = self._microbatch, None
        if (
            kept is None
            or len(microbatches) != 1
            or not _same_rows(kept, microbatches[0])
            or self._versions != self._weight_versions()
        ):
            return list(microbatches)
        return [dataclasses.replace(microbatches[0], hidden=kept.hidden)]

    def _weight_versions(self) -> list[int]:
        """Version counter of each weight, which a write increases."""
        return [parameter._version for parameter in self._model.parameters()]


def _same_rows(one: Microbatch, other: Microbatch) -> bool:
    """Return whether two micro-batches hold the same sequences, in the same order and frame."""
    return all(
        torch.equal(one.columns[name], other.columns[name])
        for name in ("input_ids", "input_lengths")
    )
