"""Data sets, and the order of a run's batches, which depends only on seed and epoch.

Every rank gets the same global batches. Handles shard a batch later.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from aligner.config import DataConfig, ExampleDataConfig, PairDataConfig, PromptSourceConfig
from aligner.data.batches import Shares
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
        shares: Shares | None = None,
    ) -> None:
        """Create a data set of ``items``.

        ``dropped_too_long``: number of dropped items. ``taken``: descriptions of recognised
        columns. ``shares``: shares of several sources.
        """
        self.items = items
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
        return max(item.length for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> T:
        return self.items[index]


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
