"""Common base of the data sets: items read and measured once, in the order of their source."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar

from aligner.config import (
    AskedDataConfig,
    DataConfig,
    ExampleDataConfig,
    PairDataConfig,
    PromptSourceConfig,
)
from aligner.data.readers import Row, read_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError, TokenizerError

logger = logging.getLogger(__name__)


class Measured(Protocol):
    """An item that knows its length."""

    @property
    def length(self) -> int:
        """Tokens of its (longest) sequence."""
        ...


T = TypeVar("T", bound=Measured)


class Dataset(Generic[T]):
    """All items, in the order of their source. ``len`` and indexing; immutable."""

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
        if self.validation is None:
            return {"training": self.train}
        return {"training": self.train, "validation": self.validation}

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
