"""Types of fields, which pydantic validates in ``parse.build``.

Booleans, texts and numbers are strict: ``"8"`` is not a number, and 1 is not a boolean.
"""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator, BeforeValidator, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError, PydanticKnownError, PydanticUseDefault

from aligner.hub import DATA_ON_HUB, ON_HUB


def _integer(value: Any) -> Any:
    """Convert a float without a fraction to int. Refuse an integer that exceeds 64 bits."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PydanticCustomError("too_large", "must fit 64 bits, got {got}")
    return value


def _default_for_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


# A number that a run derives if it is null. A section constructed in code has the field's default.
DERIVED = BeforeValidator(_default_for_null)
# A value that a script requires, unless a group sets it to null.
REQUIRED_BY_SCRIPTS = "required by scripts"


def aliases(spellings: Mapping[str, Any]) -> BeforeValidator:
    """Return a validator that replaces a key of ``spellings`` by its value."""
    return BeforeValidator(lambda x: spellings.get(x, x) if isinstance(x, str) else x)


def one_of(names: Collection[str], *, or_path: str = "") -> AfterValidator:
    """Return a validator for the strings in ``names``, or with ``or_path`` also import paths."""

    def check(text: str) -> str:
        if text in names or (or_path and re.search("[:.]", text)):
            return text
        expected = [*names, or_path] if or_path else names
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, expected))})

    return AfterValidator(check)


def not_empty(expected: str) -> AfterValidator:
    """Return a validator that refuses blank text. ``expected``: description of valid text."""

    def check(text: str) -> str:
        if not text.strip():
            raise PydanticCustomError(
                "empty", "empty, got {got}. Give {expected}", {"expected": expected}
            )
        return text

    return AfterValidator(check)


FilePath = Annotated[StrictStr, not_empty("a path, or leave the key out")]
Directory = Annotated[StrictStr, not_empty("a directory")]
ModelPath = Annotated[
    StrictStr, not_empty("the path of a .nemo file or of a Hugging Face directory"), ON_HUB
]
Source = Annotated[
    StrictStr,
    not_empty("a .jsonl or .parquet file or a generator function (package.module:function)"),
    DATA_ON_HUB,
]
_FUNCTION = "a function, package.module:function or path/to/file.py:function"
Function = Annotated[StrictStr, not_empty(_FUNCTION)]
_CLASS = "a class, package.module:Class or path/to/file.py:Class"
UserClass = Annotated[StrictStr, not_empty(_CLASS)]
Integer = Annotated[StrictInt, BeforeValidator(_integer)]
Count = Annotated[Integer, Interval(ge=1)]
SpecialTokensInText = Literal["keep", "refuse", "escape"]
# Rows whose columns a process stores. Host memory does not suffice for more than a million.
BatchSize = Annotated[Integer, Interval(ge=1, le=1_000_000)]
Natural = Annotated[Integer, Interval(ge=0)]
Positive = Annotated[StrictFloat, Interval(gt=0)]
NonNegative = Annotated[StrictFloat, Interval(ge=0)]
# System calls count the milliseconds of a wait in 32 bits: at most 24 days.
MOST_SECONDS = 2_000_000.0
Seconds = Annotated[StrictFloat, Interval(gt=0, le=MOST_SECONDS)]
Beta = Annotated[StrictFloat, Interval(ge=0, lt=1)]
MinorShare = Annotated[StrictFloat, Interval(ge=0, lt=0.5)]
AboveOne = Annotated[StrictFloat, Interval(gt=1)]
Fraction = Annotated[StrictFloat, Interval(ge=0, le=1)]
