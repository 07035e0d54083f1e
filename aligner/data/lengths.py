"""What is too long is left out and counted, never cut."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from aligner.data.readers import Source
from aligner.errors import DataError

logger = logging.getLogger(__name__)
T = TypeVar("T")


def drop_too_long(
    items: Sequence[T],
    length_of: Callable[[T], int],
    limit: int | None,
    *,
    source: Source,
    what: str,
    key: str,
) -> list[T]:
    """``items`` of at most ``limit`` tokens (None: all); a warning counts the others.

    ``what`` and ``key`` name the items and the setting, for messages. `DataError` where none is
    left.
    """
    kept = [item for item in items if limit is None or length_of(item) <= limit]
    dropped = len(items) - len(kept)
    if dropped:
        longest = max(map(length_of, items))
        summary = (
            f"{dropped} of {len(items)} {what} of {source} are longer than {key}={limit} tokens "
            f"(the longest has {longest})"
        )
        if not kept:
            raise DataError(f"data: {summary}; none is left: raise {key}")
        logger.warning("%s and were dropped", summary)
    return kept
