"""Annotated field types: what a number may be is written in its type.

``Annotated[int, Range(low=1)]`` is an ``int`` to a type checker and a checked range to
``parse.build``.
"""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; a bound of None is open, ``exclusive`` excludes ``low``."""

    low: float | None = None
    high: float | None = None
    exclusive: bool = False

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies in the interval; NaN never does."""
        if self.low is not None and not (value > self.low if self.exclusive else value >= self.low):
            return False
        return (self.high is None or value <= self.high) and value == value

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"between {self.low:g} and {self.high:g}"
        if self.low is not None:
            return f"greater than {self.low:g}" if self.exclusive else f"at least {self.low:g}"
        return f"at most {self.high:g}"


# Metadata of a number that may be null in a run's configuration, which then works it out. Its
# default is what a section built by hand has.
DERIVED = {"derived": True}

Count = Annotated[int, Range(low=1)]
Natural = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(low=0.0, exclusive=True)]
NonNegative = Annotated[float, Range(low=0.0)]
Fraction = Annotated[float, Range(low=0.0, high=1.0)]
