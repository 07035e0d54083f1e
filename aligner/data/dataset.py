"""Data sets: rows that are read and tokenized once, at the start of a run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from aligner.config import DataConfig, ExampleDataConfig, PairDataConfig, PromptSourceConfig
from aligner.data.batches import Mixture
from aligner.data.columns import recognise
from aligner.data.readers import DataRow, read_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError, TokenizerError

logger = logging.getLogger(__name__)


class Measured(Protocol):
    """Item of a data set: one or several token sequences."""

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""


T = TypeVar("T", bound=Measured)


class Dataset(Generic[T]):
    """Sequence of all items, in the order of their source. Subclasses define `make`."""

    noun: ClassVar[str] = "examples"  # word for the items in messages
    keys: ClassVar[tuple[str, ...]] = ()  # keys of the section ``data`` that name required columns

    def __init__(
        self,
        items: list[T],
        *,
        dropped_too_long: int = 0,
        recognised: Sequence[str] = (),
        mixture: Mixture | None = None,
    ) -> None:
        """Create a data set of ``items``.

        ``dropped_too_long``: number of items that were dropped, because they were too long.
        ``recognised``: third result of `recognise`, for each source. ``mixture``: order of the
        items, if their sources have weights.
        """
        self.items = items
        self.dropped_too_long, self.recognised, self.mixture = dropped_too_long, recognised, mixture

    @classmethod
    def load(cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: Any) -> Self:
        """Read, check and tokenize ``source`` with the settings ``data``, a configuration section.

        Raises `DataError` if there are no rows, a row is invalid (the message names file, line and
        columns), or all items are too long.
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
        """Convert every row to an item. Items that are too long are dropped, not truncated.

        Args:
            source: files or a generator function, see `aligner.data.readers.read_rows`.
            make: function ``make(row, index, data=section)`` that returns the item of a row.
                ``section`` is a copy of ``data`` with the names of recognised columns.
            data: configuration section with the names of the columns.
            keys: keys of ``data`` that name required columns (see `aligner.data.columns`).
            longest: maximum number of tokens of an item, or None for no limit.
            key: configuration key that sets ``longest``, for messages.

        Raises:
            DataError: there are no rows, a row is invalid, or all items are too long.
        """
        name = source.source
        parts = [name] if isinstance(name, str) else list(name)
        # Read one source after the other. The first row of each determines the columns.
        items: list[T] = []
        texts: list[str] = []
        ends, rows_read = [], 0
        for part in parts:
            limit = None if source.limit is None else source.limit - rows_read
            columns = None
            for row in islice(read_rows(part, source.arguments), limit):
                section, convert, notes = columns = columns or recognise(row, data, keys)
                items += [
                    make(new, len(items) + n, data=section) for n, new in enumerate(convert(row))
                ]
                rows_read += 1
            if columns is not None and notes:
                texts.append(f"{part}: {', '.join(notes)}")
            ends.append(len(items))
        # Drop items that are too long.
        fits = [longest is None or item.length <= longest for item in items]
        fitting = [item for item, does_fit in zip(items, fits, strict=True) if does_fit]
        dropped, problem = len(items) - len(fitting), f"{name} contains no rows"
        if items:
            problem = (
                f"{dropped} of {len(items)} {cls.noun} of {name} are longer than {key}={longest} "
                f"tokens (the longest has {max(item.length for item in items)})"
            )
        if not fitting:
            remedy = f". None is left: raise {key}" if items else ". Give data with rows"
            raise DataError(f"data: {problem}{remedy}")
        if dropped:
            logger.warning("%s and were dropped", problem)
        sizes = [sum(fits[start:end]) for start, end in pairwise([0, *ends])]
        is_train = source is getattr(data, "train", None)
        weights = getattr(data, "weights", None) if is_train else None
        mixture = None if weights is None else Mixture(parts, sizes, weights)
        return cls(fitting, dropped_too_long=dropped, recognised=texts, mixture=mixture)

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: Any) -> T:
        """Return the item of ``row``, whose index in the source is ``index``.

        Raises `DataError`, with the row's location, if the row is invalid.
        """
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
        """Load training and validation data as data sets of the class ``kind``."""
        train = kind.load(data.train, tokenizer, data)
        if data.validation is None:
            return Split(train)
        return Split(train, kind.load(data.validation, tokenizer, data))

    @property
    def named(self) -> dict[str, D]:
        """Name → data set, for ``training`` and, if there is one, ``validation``."""
        sets = {"training": self.train, "validation": self.validation}
        return {name: items for name, items in sets.items() if items is not None}

    def notes(self) -> list[str]:
        """Return a text about the recognised columns of each source, for the start-up report."""
        return [
            f"columns of the {name} data that were recognised: {text}"
            for name, items in self.named.items()
            for text in items.recognised
        ]

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest sequence in both data sets."""
        return max(items.max_length for items in self.named.values())


def check_section(data: Any, tokenizer: Tokenizer) -> None:
    """Check settings of the configuration section ``data`` that could make every row invalid.

    Raises `ConfigError` if ``max_length`` is below 2, and `TokenizerError` if ``add_bos`` is true
    and the tokenizer has no BOS token.
    """
    longest = getattr(data, "max_length", None)
    if longest is not None and longest < 2:
        raise ConfigError(
            f"data: max_length={longest} must be at least 2, because a sequence has a prompt and a "
            "response of at least one token each"
        )
    if data.add_bos and tokenizer.bos_id is None:
        raise TokenizerError(
            "data.add_bos=true, but the tokenizer has no BOS token. Set data.add_bos=false"
        )
