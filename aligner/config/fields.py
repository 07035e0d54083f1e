"""Annotated field types: what a number may be is written in its type.

``Annotated[int, Range(low=1)]`` is an ``int`` to a type checker and a checked range to
``parse.build``; `Aliases` and `Refused` do the same for the names that a value may have.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; a bound of None is open.

    ``exclusive`` excludes ``low``, ``exclusive_high`` excludes ``high``. Infinity and NaN are in no
    interval.
    """

    low: float | None = None
    high: float | None = None
    exclusive: bool = False
    exclusive_high: bool = False

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies in the interval."""
        if not math.isfinite(value):
            return False
        if self.low is not None and not (value > self.low if self.exclusive else value >= self.low):
            return False
        if self.high is None:
            return True
        return value < self.high if self.exclusive_high else value <= self.high

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            below = " (exclusive)" if self.exclusive_high else ""
            return f"between {self.low:g} and {self.high:g}{below}"
        if self.low is not None:
            return f"greater than {self.low:g}" if self.exclusive else f"at least {self.low:g}"
        return f"at most {self.high:g}"


# Metadata of a number that may be null in a run's configuration, which then works it out. Its
# default is what a section built by hand has.
DERIVED = {"derived": True}


@dataclass(frozen=True)
class Aliases:
    """Other spellings of a value, as pairs of what may be written and what it means."""

    pairs: tuple[tuple[str, Any], ...]

    def resolve(self, value: Any) -> Any:
        """Meaning of ``value``; itself where it is no alias."""
        return next((meant for written, meant in self.pairs if value == written), value)


@dataclass(frozen=True)
class Refused:
    """Values that other libraries have, as pairs of the value and why it is refused here."""

    pairs: tuple[tuple[str, str], ...]

    def reason(self, value: Any) -> str | None:
        """Reason why ``value`` is refused; None where it is not one of these."""
        if isinstance(value, bool):
            return None
        return next((why for refused, why in self.pairs if str(value) == refused), None)


@dataclass(frozen=True)
class Names:
    """Names that a text may be.

    ``or_path``: or the path of a user's own function, which has a colon or a dot in it.
    """

    names: tuple[str, ...]
    or_path: bool = False

    def is_path(self, value: str) -> bool:
        """Return whether ``value`` names something of the user's own."""
        return self.or_path and (":" in value or "." in value)


@dataclass(frozen=True)
class NotEmpty:
    """A text that names something: blank is refused; ``wanted``: what to give, for the message."""

    wanted: str


FilePath = Annotated[str, NotEmpty("a path, or leave the key out")]
Directory = Annotated[str, NotEmpty("a directory")]
ModelPath = Annotated[str, NotEmpty("the path of a .nemo file or of a Hugging Face directory")]
Source = Annotated[
    str,
    NotEmpty("a .jsonl or .parquet file or a generator function (package.module:function)"),
]
Function = Annotated[
    str, NotEmpty("a function, package.module:function or path/to/file.py:function")
]
UserClass = Annotated[str, NotEmpty("a class, package.module:Class or path/to/file.py:Class")]
Count = Annotated[int, Range(low=1)]
# Rows that a process lists, and whose columns it holds: beyond a million host memory ends first.
BatchSize = Annotated[int, Range(low=1, high=1_000_000)]
Natural = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(low=0.0, exclusive=True)]
NonNegative = Annotated[float, Range(low=0.0)]
# Waits end up in system calls that count milliseconds in 32 bits: 24 days at most.
MOST_SECONDS = 2_000_000.0
Seconds = Annotated[float, Range(low=0.0, high=MOST_SECONDS, exclusive=True)]
Beta = Annotated[float, Range(low=0.0, high=1.0, exclusive_high=True)]
Fraction = Annotated[float, Range(low=0.0, high=1.0)]
