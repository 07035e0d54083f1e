"""Common base of the data sets: items read and measured once, in the order of their source."""

import logging
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from aligner.data.readers import Row, Source, read_rows
from aligner.errors import DataError

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

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(item.length for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> T:
        return self._items[index]


def read_items(
    source: Source,
    make: Callable[[Row, int], T],
    *,
    longest: int | None,
    what: str,
    key: str = "max_length",
    arguments: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> tuple[list[T], int]:
    """Read every row and make an item of it; what is too long is left out, never cut.

    Args:
        source: files or a generator function, see :func:`aligner.data.readers.read_rows`.
        make: an item of a row and the row's place in the source, counted before any is dropped.
        longest: items of more tokens are dropped; a warning counts them. None: all are kept.
        what: what the items are called in messages.
        key: the setting that ``longest`` comes from.
        arguments: keyword arguments of a generator function.
        limit: read at most this many rows (an endless generator needs it).

    Returns:
        The items that are kept, and how many were dropped.

    Raises:
        DataError: no rows, a bad row, or nothing left after dropping what is too long.
    """
    rows = islice(read_rows(source, arguments), limit)
    items = [make(row, index) for index, row in enumerate(rows)]
    if not items:
        raise DataError(f"data: {source} holds no rows")
    kept = [item for item in items if longest is None or item.length <= longest]
    dropped = len(items) - len(kept)
    if dropped:
        summary = (
            f"{dropped} of {len(items)} {what} of {source} are longer than {key}={longest} tokens "
            f"(the longest has {max(item.length for item in items)})"
        )
        if not kept:
            raise DataError(f"data: {summary}; none is left: raise {key}")
        logger.warning("%s and were dropped", summary)
    return kept, dropped
