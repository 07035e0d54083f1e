"""Order of the prompts: decided by seed and epoch only, never by the number of ranks.

Every rank gets the same global batches; handles shard a batch later.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from aligner.errors import ConfigError, DataError

LastBatch = Literal["wrap", "drop"]


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Indices 0..size-1, int64 [size], in the order of ``epoch``."""
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


class PromptSampler:
    """An endless, resumable series of global batches of indices.

    ``last_batch="wrap"``: a batch that an epoch cannot fill takes its rest from the next epoch's
    order, so every prompt is seen once per epoch and ``batch_size`` may exceed the data set (a
    batch then holds a prompt more than once). ``"drop"``: what is left of an epoch is not used,
    and ``batch_size`` must not exceed the data set.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        last_batch: LastBatch = "wrap",
    ) -> None:
        """Take ``batch_size`` of ``size`` prompts at a time, from the first epoch on."""
        if size < 1:
            raise DataError("data: the data set is empty")
        if batch_size < 1:
            raise ConfigError(f"data: a batch of {batch_size} prompts; it must have at least 1")
        if last_batch not in ("wrap", "drop"):
            raise ConfigError(f"data: last_batch={last_batch!r} must be wrap or drop")
        if last_batch == "drop" and batch_size > size:
            raise ConfigError(
                f"data: a batch of {batch_size} prompts is larger than the data set ({size}) and "
                "last_batch=drop would drop everything; use last_batch=wrap or smaller batches"
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.last_batch = last_batch
        self.epoch = 0  # of the next prompt
        self.position = 0  # of the next prompt within its epoch
        self._order = self._order_of(0)

    def next_batch(self, count: int | None = None) -> list[int]:
        """The next ``count`` indices; default ``batch_size``."""
        count = self.batch_size if count is None else count
        batch: list[int] = []
        if self.last_batch == "drop" and self.size - self.position < count:
            self._begin_epoch(self.epoch + 1)
        while len(batch) < count:
            if self.position == self.size:
                self._begin_epoch(self.epoch + 1)
            taken = self._order[self.position :][: count - len(batch)]
            batch.extend(taken.tolist())
            self.position += len(taken)
        return batch

    def __iter__(self) -> Iterator[list[int]]:
        """Batches without end."""
        while True:
            yield self.next_batch()

    def left_in(self, epochs: int) -> int:
        """Number of indices of the first ``epochs`` epochs that are left."""
        return max(0, (epochs - self.epoch) * self.size - self.position)

    def batches_in(self, epochs: int) -> int:
        """Number of batches that the first ``epochs`` epochs begin (wrap) or fill (drop)."""
        if self.last_batch == "drop":
            return epochs * (self.size // self.batch_size)
        return -(-epochs * self.size // self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last batch."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; the data set and the seed must be the same.

        The batch size may differ: the position is counted in prompts.
        """
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"data: the saved run had {name}={state[name]} and this one has "
                    f"{name}={getattr(self, name)}; resume with the same data and seed, or "
                    "start a new run in another directory"
                )
        self._begin_epoch(state["epoch"])
        self.position = state["position"]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        return epoch_order(self.size, self.seed, epoch, shuffle=self.shuffle)


def sequential_batches(size: int, batch_size: int) -> Iterator[list[int]]:
    """Indices 0..size-1 once, in order; the last batch may be smaller (validation)."""
    for start in range(0, size, batch_size):
        yield list(range(start, min(start + batch_size, size)))
