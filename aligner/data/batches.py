"""Order of a data set's items in a run, and batches of prompts.

Batches are right-padded. Lengths, not padding ids, tell where a sequence ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligner.data.chat import MESSAGES, Message
from aligner.errors import DataError


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Return the indices 0..size-1 in the order of ``epoch``, int64 [size]."""
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


class Mixture:
    """Mixture of several sources by weight. An epoch has as many items as the sources together.

    ``names``, ``sizes`` and ``weights``: name, number of items and relative weight of each source.
    A source is read in endless passes, each shuffled anew. If its weight gives ``n`` items per
    epoch, epoch e gets the items ``e * n`` to ``(e + 1) * n - 1`` of this endless sequence. Raises
    `DataError` if an epoch would contain no item of a source.
    """

    def __init__(
        self, names: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]
    ) -> None:
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * sum(sizes)).astype(np.int64)
        self.sizes, self.counts = list(sizes), np.diff(ends, prepend=0).tolist()
        for name, size, count in zip(names, self.sizes, self.counts, strict=True):
            if not size or not count:
                raise DataError(
                    f"data.weights={list(weights)}: {name} has {size} items and {count} of the "
                    f"{sum(sizes)} items of an epoch. Raise its weight, or remove the source"
                )

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        """Return the order of ``epoch``, int64 [size]: indices into the concatenated sources."""
        parts, positions, first = [], [], 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            start, end = epoch * count, (epoch + 1) * count
            passes = range(start // size, -(-end // size))
            # `first` gives each source other random numbers.
            orders = [epoch_order(size, seed + first, part, shuffle=shuffle) for part in passes]
            skipped = start - passes.start * size
            parts.append(first + np.concatenate(orders)[skipped:][:count])
            positions.append((np.arange(count) + 0.5) / count)
            first += size
        # Without shuffling, the items of each source are evenly distributed.
        order = np.concatenate(parts)
        if not shuffle:
            return order[np.argsort(np.concatenate(positions), kind="stable")]
        return order[epoch_order(len(order), seed, epoch)]


class PromptSampler:
    """Endless sequence of global batches of prompt indices, which can be saved and resumed.

    Every prompt occurs once per epoch. The last batch of an epoch is filled from the next epoch. If
    ``batch_size`` exceeds the number of prompts, a batch contains a prompt several times.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        may_change: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        """Start at the first epoch of ``size`` prompts.

        ``may_change``: whether `load_state_dict` accepts a state with another size, seed or
        ``shuffle``. ``mixture``: order of the prompts of several sources.
        """
        self.size, self.batch_size = size, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.may_change, self.mixture = may_change, mixture
        self._begin_epoch(0)

    def next_batch(self, count: int | None = None) -> list[int]:
        """Return the next ``count`` indices, by default ``batch_size``."""
        count = self.batch_size if count is None else count
        batch: list[int] = []
        while len(batch) < count:
            if self.position == self.size:
                self._begin_epoch(self.epoch + 1)
            indices = self._order[self.position :][: count - len(batch)]
            batch.extend(indices.tolist())
            self.position += len(indices)
        return batch

    def left_in(self, epochs: int) -> int:
        """Return how many indices of the first ``epochs`` epochs were not returned yet."""
        return max(0, (epochs - self.epoch) * self.size - self.position)

    def batches_left(self, epochs: int) -> int:
        """Return the number of batches that remain in the first ``epochs`` epochs, rounded up."""
        return -(-self.left_in(epochs) // self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues after the last batch."""
        return {
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, a result of `state_dict`. The batch size may differ.

        Raises `DataError` if ``size``, ``seed`` or ``shuffle`` differ. With ``may_change``, it
        continues at the same position of the new order instead, or at the next epoch if the new
        order is shorter.
        """
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name) and not self.may_change:
                raise DataError(
                    f"data: the saved run had {name}={state[name]}, but this run has "
                    f"{name}={getattr(self, name)}. Resume with the same data and seed, or "
                    "start a new run in another directory"
                )
        self._begin_epoch(state["epoch"])
        self.position = min(state["position"], self.size)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # of the next prompt
        self.position = 0  # of the next prompt within its epoch
        order = partial(epoch_order, self.size) if self.mixture is None else self.mixture.order
        self._order = order(self.seed, epoch, shuffle=self.shuffle)


def sequential_batches(size: int, batch_size: int) -> Iterator[list[int]]:
    """Yield batches of the indices 0..size-1 in order. The last batch may be smaller."""
    for start in range(0, size, batch_size):
        yield [*range(start, min(start + batch_size, size))]


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``id`` is the index of its row in the source, counting dropped rows."""

    id: int
    text: str  # text of ``ids``, with the chat template applied
    ids: list[int]
    ground_truth: Any
    columns: dict[str, Any] = field(default_factory=dict)  # other columns of the row
    messages: list[Message] | None = None  # None for plain text

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.ids)


@dataclass(frozen=True)
class PromptBatch:
    """Batch of ``B`` prompts, with tensors for the model and lists for the reward function."""

    input_ids: Tensor  # int64 [B, P], right-padded
    input_lengths: Tensor  # int64 [B], tokens without padding
    prompt_ids: Tensor  # int64 [B], `Prompt.id`
    texts: list[str]
    ground_truths: list[Any]
    columns: dict[str, list[Any]]  # column → B values, None if a row lacks the column

    def __len__(self) -> int:
        return len(self.texts)


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad token lists to the longest. Returns ids, int64 [B, P], and lengths, int64 [B]."""
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    longest = int(lengths.max()) if len(sequences) else 0
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return ids, lengths


def collate_prompts(prompts: Sequence[Prompt], pad_id: int) -> PromptBatch:
    """Return a batch of ``prompts`` in their order."""
    input_ids, input_lengths = pad_right([prompt.ids for prompt in prompts], pad_id)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    if any(prompt.messages is not None for prompt in prompts):
        columns[MESSAGES] = [prompt.messages for prompt in prompts]
    return PromptBatch(
        input_ids=input_ids,
        input_lengths=input_lengths,
        prompt_ids=torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64),
        texts=[prompt.text for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        columns=columns,
    )
