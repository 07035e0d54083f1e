"""Types of fields: what a value may be is written in its type.

``Count`` is an ``int`` to a type checker, and to pydantic, which checks it in ``parse.build``, an
integer of at least 1. Booleans, texts and numbers are strict: ``"8"`` is no number, 1 no boolean.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator, BeforeValidator, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError, PydanticKnownError, PydanticUseDefault


def _whole(value: Any) -> Any:
    """A float without a fraction as the integer that it is."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PydanticCustomError("too_large", "must fit 64 bits, got {got}")
    return value


def _default_for_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


# A number that may be null in a run's configuration, which then works it out. Its default is what a
# section built by hand has.
DERIVED = BeforeValidator(_default_for_null)
# A value that may be null, but that a script requires unless a group sets it to null.
ASKED_FOR = "asked for"


def aliases(others: Mapping[str, Any]) -> BeforeValidator:
    """Other spellings of a value, and what each means."""
    return BeforeValidator(
        lambda value: others.get(value, value) if isinstance(value, str) else value
    )


def one_of(names: Collection[str], *, or_path: str = "") -> AfterValidator:
    """A text that is one of ``names``.

    ``or_path``: form of another value, the path of a user's own function or class, which has a
    colon or a dot in it; empty: there is none.
    """

    def check(text: str) -> str:
        if text in names or (or_path and re.search("[:.]", text)):
            return text
        expected = [*names, or_path] if or_path else names
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, expected))})

    return AfterValidator(check)


def not_empty(wanted: str) -> AfterValidator:
    """A text that names something: blank is refused; ``wanted``: what to give, for the message."""

    def check(text: str) -> str:
        if not text.strip():
            raise PydanticCustomError(
                "empty", "empty, got {got}; give {wanted}", {"wanted": wanted}
            )
        return text

    return AfterValidator(check)


FilePath = Annotated[StrictStr, not_empty("a path, or leave the key out")]
Directory = Annotated[StrictStr, not_empty("a directory")]


def _cached(path: str) -> str:
    """The directory of a model that a name of Hugging Face's hub stands for, if it is cached."""
    if not re.fullmatch(HUB_NAME, path) or path.endswith(".nemo") or os.path.exists(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):  # it is not there, or is no name after all
        return path
    return folder if os.path.isfile(os.path.join(folder, "config.json")) else path


HUB_NAME = r"[\w.-]+/[\w.-]+"
ModelPath = Annotated[
    StrictStr,
    not_empty("the path of a .nemo file or of a Hugging Face directory"),
    AfterValidator(_cached),
]
Source = Annotated[
    StrictStr,
    not_empty("a .jsonl or .parquet file or a generator function (package.module:function)"),
]
Function = Annotated[
    StrictStr, not_empty("a function, package.module:function or path/to/file.py:function")
]
UserClass = Annotated[
    StrictStr, not_empty("a class, package.module:Class or path/to/file.py:Class")
]
Integer = Annotated[StrictInt, BeforeValidator(_whole)]
Count = Annotated[Integer, Interval(ge=1)]
SpecialTokensInText = Literal["keep", "refuse", "escape"]
# Rows that a process lists, and whose columns it holds: beyond a million host memory ends first.
BatchSize = Annotated[Integer, Interval(ge=1, le=1_000_000)]
Natural = Annotated[Integer, Interval(ge=0)]
Positive = Annotated[StrictFloat, Interval(gt=0)]
NonNegative = Annotated[StrictFloat, Interval(ge=0)]
# Waits end up in system calls that count milliseconds in 32 bits: 24 days at most.
MOST_SECONDS = 2_000_000.0
Seconds = Annotated[StrictFloat, Interval(gt=0, le=MOST_SECONDS)]
Beta = Annotated[StrictFloat, Interval(ge=0, lt=1)]
MinorShare = Annotated[StrictFloat, Interval(ge=0, lt=0.5)]
AboveOne = Annotated[StrictFloat, Interval(gt=1)]
Fraction = Annotated[StrictFloat, Interval(ge=0, le=1)]
