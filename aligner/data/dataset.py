"""Data sets, and the order of a run's batches, which depends only on seed and epoch.

Every rank gets the same global batches. Handles shard a batch later.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from aligner.config import DataConfig, ExampleDataConfig, PairDataConfig, PromptSourceConfig
from aligner.data.columns import recognised
from aligner.data.readers import DataRow, read_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError, TokenizerError

logger = logging.getLogger(__name__)


class Measured(Protocol):
    """An item of a data set."""

    @property
    def length(self) -> int:
        """Number of tokens of the (longest) sequence."""


T = TypeVar("T", bound=Measured)


class Dataset(Generic[T]):
    """Immutable sequence of all items, in the order of their source. Subclasses define `make`."""

    noun: ClassVar[str] = "examples"  # name of the items in messages
    keys: ClassVar[tuple[str, ...]] = ()  # keys of the columns that a row needs

    def __init__(
        self,
        items: list[T],
        *,
        dropped_too_long: int = 0,
        taken: Sequence[str] = (),
        shares: "Shares | None" = None,
    ) -> None:
        """Create a data set of ``items``.

        ``dropped_too_long``: number of dropped items. ``taken``: descriptions of recognised
        columns. ``shares``: shares of several sources.
        """
        self._items = items
        self.dropped_too_long, self.taken, self.shares = dropped_too_long, taken, shares

    @classmethod
    def load(cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: Any) -> Self:
        """Read, check and tokenize ``source`` by the columns and limits of the section ``data``.

        Raises `DataError` if there are no rows, a row is invalid (with file, line and columns), or
        all items are too long.
        """
        check_section(data, tokenizer)
        make = partial(cls.make, tokenizer=tokenizer)
        return cls.read_rows(source, make, data, cls.keys, longest=data.max_length)

    @classmethod
    def read_rows(
        cls,
        source: PromptSourceConfig,
        make: Callable[..., T],
        data: Any,
        keys: Sequence[str],
        *,
        longest: int | None,
        key: str = "max_length",
    ) -> Self:
        """Convert every row to an item. Items that are too long are dropped, never cut.

        Args:
            source: files or a generator function, see `aligner.data.readers.read_rows`.
            make: function ``(row, index, data=section)`` that returns the item of a row. The
                section has the names of the columns.
            data: section of the configuration.
            keys: keys of the columns that a row needs (see `aligner.data.columns`).
            longest: maximum number of tokens of an item, or None without a limit.
            key: name of the setting of ``longest``, for messages.

        Raises:
            DataError: there are no rows, a row is invalid, or all items are too long.
        """
        name = source.source
        parts = [name] if isinstance(name, str) else list(name)
        # Read one source after the other. The first row of each determines the columns.
        items: list[T] = []
        taken: list[str] = []
        ends, read = [], 0
        for part in parts:
            limit = None if source.limit is None else source.limit - read
            form = None
            for row in islice(read_rows(part, source.arguments), limit):
                section, rows, names = form = form or recognised(row, data, keys)
                items += [
                    make(new, len(items) + n, data=section) for n, new in enumerate(rows(row))
                ]
                read += 1
            if form is not None and names:
                taken.append(f"{part}: {', '.join(names)}")
            ends.append(len(items))
        fits = [longest is None or item.length <= longest for item in items]
        fitting = [item for item, does_fit in zip(items, fits, strict=True) if does_fit]
        dropped, problem = len(items) - len(fitting), f"{name} contains no rows"
        if items:
            problem = (
                f"{dropped} of {len(items)} {cls.noun} of {name} are longer than {key}={longest} "
                f"tokens (the longest has {max(item.length for item in items)})"
            )
        if not fitting:
            remedy = f". None is left: raise {key}" if items else ""
            raise DataError(f"data: {problem}{remedy}")
        if dropped:
            logger.warning("%s and were dropped", problem)
        sizes = [sum(fits[start:end]) for start, end in pairwise([0, *ends])]
        is_train = source is getattr(data, "train", None)
        weights = getattr(data, "weights", None) if is_train else None
        shares = None if weights is None else Shares(parts, sizes, weights)
        return cls(fitting, dropped_too_long=dropped, taken=taken, shares=shares)

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: Any) -> T:
        """Convert row ``index`` of the source to an item. Errors name the row."""
        raise NotImplementedError

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(item.length for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> T:
        return self._items[index]


D = TypeVar("D", bound=Dataset[Any])
Kind = TypeVar("Kind", bound=Dataset[Any])


@dataclass(frozen=True)
class Split(Generic[D]):
    """Training examples of a run and its validation examples, if any."""

    train: D
    validation: D | None = None

    @staticmethod
    def load(
        kind: type[Kind],
        data: DataConfig | ExampleDataConfig | PairDataConfig,
        tokenizer: Tokenizer,
    ) -> "Split[Kind]":
        """Load both data sets as ``kind``."""
        train = kind.load(data.train, tokenizer, data)
        if data.validation is None:
            return Split(train)
        return Split(train, kind.load(data.validation, tokenizer, data))

    @property
    def named(self) -> dict[str, D]:
        """Map ``training`` and, if present, ``validation`` to their data sets."""
        sets = {"training": self.train, "validation": self.validation}
        return {name: items for name, items in sets.items() if items is not None}

    def notes(self) -> list[str]:
        """Return notes on recognised columns for the start-up report."""
        return [
            f"columns of the {name} data that were recognised: {text}"
            for name, items in self.named.items()
            for text in items.taken
        ]

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest sequence of both."""
        return max(items.max_length for items in self.named.values())


def check_section(data: Any, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` or `TokenizerError` if no row can become an item of this section."""
    longest = getattr(data, "max_length", None)
    if longest is not None and longest < 2:
        raise ConfigError(
            f"data: max_length={longest} must be at least 2: a token of the prompt and one of the "
            "response"
        )
    if data.add_bos and tokenizer.bos_id is None:
        raise TokenizerError("data: add_bos=true but the tokenizer has no BOS token")


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Return the indices 0..size-1, int64 [size], in the order of ``epoch``."""
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


class Shares:
    """Shares of several sources in an epoch, which has as many items as all sources together.

    A source with ``n`` items per epoch has an endless series of shuffled passes. Epoch e uses the
    items ``e * n`` to ``(e + 1) * n - 1`` of the series.
    """

    def __init__(
        self, names: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]
    ) -> None:
        """Compute the number of items of each source in an epoch, in proportion to ``weights``."""
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * sum(sizes)).astype(np.int64)
        self.sizes, self.counts = list(sizes), np.diff(ends, prepend=0).tolist()
        for name, size, count in zip(names, self.sizes, self.counts, strict=True):
            if not size or not count:
                raise DataError(
                    f"data.weights={list(weights)}: {name} has {size} items and {count} of the "
                    f"{sum(sizes)} items of an epoch. Raise its weight, or remove the source"
                )

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        """Return the indices of ``epoch``, int64 [size], into the items of all sources."""
        parts, places, first = [], [], 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            start, end = epoch * count, (epoch + 1) * count
            passes = range(start // size, -(-end // size))
            # `first` gives each source its own series of random numbers.
            series = [epoch_order(size, seed + first, part, shuffle=shuffle) for part in passes]
            skipped = start - passes.start * size
            parts.append(first + np.concatenate(series)[skipped:][:count])
            places.append((np.arange(count) + 0.5) / count)
            first += size
        # Without shuffling, the sources alternate evenly.
        order = np.concatenate(parts)
        if not shuffle:
            return order[np.argsort(np.concatenate(places), kind="stable")]
        return order[epoch_order(len(order), seed, epoch)]


class PromptSampler:
    """An endless, resumable series of global batches of indices.

    The last batch of an epoch is filled from the next epoch, so that every prompt is seen once per
    epoch. ``batch_size`` may exceed the data set. Then a batch contains a prompt several times.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        may_change: bool = False,
        shares: Shares | None = None,
    ) -> None:
        """Start at the first epoch of ``size`` prompts.

        ``may_change``: whether `load_state_dict` accepts a state with other data, another seed or
        other shuffling. ``shares``: shares of several sources.
        """
        self.size, self.batch_size = size, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.may_change, self.shares = may_change, shares
        self._begin_epoch(0)

    def next_batch(self, count: int | None = None) -> list[int]:
        """Return the next ``count`` indices. Default: ``batch_size``."""
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
        """Return the number of unused indices of the first ``epochs`` epochs."""
        return max(0, (epochs - self.epoch) * self.size - self.position)

    def batches_left(self, epochs: int) -> int:
        """Return how many further batches the first ``epochs`` epochs begin."""
        return -(-self.left_in(epochs) // self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that continues after the last batch."""
        return {
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of ``state``. The batch size may differ.

        With ``may_change`` and other data or another seed, the new order continues from the same
        prompt, or from the next epoch if the new order is shorter. Without ``may_change``, raises
        `DataError` if data, seed or shuffling differ.
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
        order = partial(epoch_order, self.size) if self.shares is None else self.shares.order
        self._order = order(self.seed, epoch, shuffle=self.shuffle)


def sequential_batches(size: int, batch_size: int) -> Iterator[list[int]]:
    """Yield batches of the indices 0..size-1 in order. The last batch may be smaller."""
    for start in range(0, size, batch_size):
        yield [*range(start, min(start + batch_size, size))]
