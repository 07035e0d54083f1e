"""Conversion of values of user code to JSON values, and of numbers to floats.

The process of the user code calls `plain`, and so does the reader of its messages and files.
"""

import math
import struct
from collections.abc import Mapping
from enum import Enum
from typing import Any

from aligner.errors import AlignerError

_DEEPEST = 64  # levels of lists and mappings
_LONGEST_INTEGER = 64  # bits
_MOST_SHOWN = 200  # characters of a value that is neither number nor text


def plain(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to None, bool, int, float, str, list and dict, without subclasses.

    Enumeration members become their values. Arrays become lists or numbers, tuples and sets become
    lists, and keys become strings. NaN and infinity become ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``. Integers of more than 64 bits, other objects, and values nested more than 64
    levels deep become the start of their ``repr``. Unpaired surrogates become ``?``.
    """
    # Convert scalars with methods of the base class, so that no code of a subclass runs.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value).encode(errors="replace").decode()
    if isinstance(value, int):
        integer = int.__int__(value)
        return integer if integer.bit_length() <= _LONGEST_INTEGER else shown(integer)
    if isinstance(value, float):
        number = float.__float__(value)
        if math.isfinite(number):
            return number
        if math.isnan(number):
            return "NaN"
        return "Infinity" if number > 0 else "-Infinity"

    # Convert containers. A key may be a scalar or an enumeration member.
    if depth < _DEEPEST:
        if isinstance(value, Enum):
            return plain(value.value, depth + 1)
        if isinstance(value, Mapping):
            items = value.items()
            return {str(plain(key, _DEEPEST - 1)): plain(item, depth + 1) for key, item in items}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain(item, depth + 1) for item in value]
        if callable(getattr(value, "tolist", None)):
            return plain(value.tolist(), depth + 1)
    return shown(value)


def shown(value: Any) -> str:
    """Return the start of a value's ``repr``, even if its ``__repr__`` raises."""
    try:
        text = repr(value).encode(errors="replace").decode()
    except Exception:  # a class whose ``__repr__`` raises, or an integer of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def as_float32(
    value: Any, subject: str, error: type[AlignerError], *, may_be_infinite: bool = False
) -> float:
    """Return a number, an enumeration member or a one-element array as float.

    ``error`` is raised for other values and if the number is not finite in float32. Its message
    begins with ``subject``. With ``may_be_infinite``, too large numbers become infinity instead.
    """
    number = value.value if isinstance(value, Enum) else value
    try:
        if isinstance(number, str | bytes):
            raise TypeError
        number = float(number.item() if callable(getattr(number, "item", None)) else number)
        struct.pack("<f", number)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise error(f"{subject} is {shown(value)}, which is not a number") from None
    if not (may_be_infinite or math.isfinite(number)):
        raise error(f"{subject} is {shown(value)}, but it must be finite in float32")
    return number
