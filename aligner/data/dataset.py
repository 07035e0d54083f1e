"""Data sets, read and measured once in the order of their source, and the order of a run's batches.

The order is decided by seed and epoch only, never by the number of ranks. Every rank gets the same
global batches; handles shard a batch later.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import numpy as np

from aligner.config import (
    AskedDataConfig,
    DataConfig,
    ExampleDataConfig,
    PairDataConfig,
    PromptSourceConfig,
)
from aligner.data.readers import Row, read_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError, TokenizerError

logger = logging.getLogger(__name__)


class Measured(Protocol):
    """An item of a data set."""

    @property
    def length(self) -> int:
        """Tokens of its (longest) sequence."""
        ...


T = TypeVar("T", bound=Measured)


class Dataset(Generic[T]):
    """All items, in the order of their source. ``len`` and indexing; immutable.

    Subclasses define `make`, and ``what``, the name of the items in messages.
    """

    what: ClassVar[str] = "examples"

    def __init__(self, items: list[T], *, dropped_too_long: int = 0) -> None:
        """Hold ``items``; ``dropped_too_long``: number of others that were dropped."""
        self._items = items
        self.dropped_too_long = dropped_too_long

    @classmethod
    def load(cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: Any) -> Self:
        """Read, check and tokenize ``source`` by the columns and limits of the section ``data``.

        Raises:
            DataError: no rows, a bad row (with file, line and the columns found), or nothing left
                after dropping what is too long.
        """
        check_section(data, tokenizer)

        def make(row: Row, index: int) -> T:
            return cls.make(row, index, tokenizer, data)

        items, dropped = read_items(source, make, longest=data.max_length, what=cls.what)
        return cls(items, dropped_too_long=dropped)

    @classmethod
    def make(cls, row: Row, index: int, tokenizer: Tokenizer, data: Any) -> T:
        """Turn one row, at place ``index`` of the source, into an item; errors name the row."""
        raise NotImplementedError

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(item.length for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> T:
        return self._items[index]


D = TypeVar("D", bound=Dataset[Any])
Kind = TypeVar("Kind", bound=Dataset[Any])


@dataclass(frozen=True)
class Split(Generic[D]):
    """Training examples of a run and, where it has them, those for validation."""

    train: D
    validation: D | None = None

    @staticmethod
    def load(
        kind: type[Kind],
        data: DataConfig | ExampleDataConfig | PairDataConfig,
        tokenizer: Tokenizer,
    ) -> "Split[Kind]":
        """Load both as data sets of ``kind``."""
        train = kind.load(data.train, tokenizer, data)
        if data.validation is None:
            return Split(train)
        return Split(train, kind.load(data.validation, tokenizer, data))

    @property
    def named(self) -> dict[str, D]:
        """``training`` and, where there is one, ``validation``."""
        further = {} if self.validation is None else {"validation": self.validation}
        return {"training": self.train, **further}

    @property
    def max_length(self) -> int:
        """Length of the longest sequence of both, in tokens."""
        return max(each.max_length for each in self.named.values())


def read_items(
    source: PromptSourceConfig,
    make: Callable[[Row, int], T],
    *,
    longest: int | None,
    what: str,
    key: str = "max_length",
) -> tuple[list[T], int]:
    """Read every row and make an item of it; what is too long is left out, never cut.

    Args:
        source: files or a generator function, see :func:`aligner.data.readers.read_rows`; of an
            endless generator no more rows than its ``limit`` are read.
        make: an item of a row and the row's place in the source, counted before any is dropped.
        longest: items of more tokens are dropped; a warning counts them. None: all are kept.
        what: what the items are called in messages.
        key: the setting that ``longest`` comes from.

    Returns:
        The items that are kept, and how many were dropped.

    Raises:
        DataError: no rows, a bad row, or nothing left after dropping what is too long.
    """
    name = source.source
    rows = islice(read_rows(name, source.arguments), source.limit)
    items = [make(row, index) for index, row in enumerate(rows)]
    if not items:
        raise DataError(f"data: {name} holds no rows")
    kept = [item for item in items if longest is None or item.length <= longest]
    dropped = len(items) - len(kept)
    if dropped:
        summary = (
            f"{dropped} of {len(items)} {what} of {name} are longer than {key}={longest} tokens "
            f"(the longest has {max(item.length for item in items)})"
        )
        if not kept:
            raise DataError(f"data: {summary}; none is left: raise {key}")
        logger.warning("%s and were dropped", summary)
    return kept, dropped


def check_bos(
    data: DataConfig | AskedDataConfig | ExampleDataConfig | PairDataConfig, tokenizer: Tokenizer
) -> None:
    """Refuse ``add_bos`` where the tokenizer has no BOS token."""
    if data.add_bos and tokenizer.bos_id is None:
        raise TokenizerError("data: add_bos=true but the tokenizer has no BOS token")


def check_section(data: ExampleDataConfig | PairDataConfig, tokenizer: Tokenizer) -> None:
    """Refuse a section of which no row can become an example."""
    if data.max_length is not None and data.max_length < 2:
        raise ConfigError(
            f"data: max_length={data.max_length} must be at least 2 tokens, a prompt's "
            "and a response's"
        )
    check_bos(data, tokenizer)


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
        may_change: bool = False,
    ) -> None:
        """Take ``batch_size`` of ``size`` prompts at a time, from the first epoch on.

        ``may_change``: `load_state_dict` accepts the state of other data, seed or shuffling.
        """
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
        self.may_change = may_change
        self._begin_epoch(0)

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

    def batches_left(self, epochs: int) -> int:
        """Number of batches after the last one that the first ``epochs`` epochs begin or fill."""
        if self.last_batch == "wrap":
            return -(-self.left_in(epochs) // self.batch_size)
        of_this, of_an_epoch = self.size - self.position, self.size // self.batch_size
        whole = max(0, epochs - self.epoch - 1) * of_an_epoch
        return whole + (of_this // self.batch_size if self.epoch < epochs else 0)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last batch."""
        return {
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of ``state``; the batch size may differ.

        The position is counted in prompts. With ``may_change``, an order of other data or another
        seed is followed from the same position on, or from the next epoch if it is shorter.

        Raises:
            DataError: data, seed or shuffling differ, and ``may_change`` is false.
        """
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name) and not self.may_change:
                raise DataError(
                    f"data: the saved run had {name}={state[name]} and this one has "
                    f"{name}={getattr(self, name)}; resume with the same data and seed, or "
                    "start a new run in another directory"
                )
        self._begin_epoch(state["epoch"])
        self.position = min(state["position"], self.size)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # of the next prompt
        self.position = 0  # of the next prompt within its epoch
        self._order = epoch_order(self.size, self.seed, epoch, shuffle=self.shuffle)


def sequential_batches(size: int, batch_size: int) -> Iterator[list[int]]:
    """Indices 0..size-1 once, in order; the last batch may be smaller (validation)."""
    for start in range(0, size, batch_size):
        yield [*range(start, min(start + batch_size, size))]
