"""Values of a user's code as values of JSON, by fixed rules.

What a less trusted process sends, and what is written to files, passes through `plain`. It runs in
the process of the user's code, and once more where the answer is read.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

_DEEPEST = 64  # lists and mappings in each other
_LONGEST_INTEGER = 64  # bits
_MOST_SHOWN = 200  # characters of a value that is no number or text


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` made of None, bool, int, float, str, list and dict, each of exactly that class.

    An enumeration's member becomes its value; a subclass of a number or of text becomes that number
    or text; arrays and their scalars become lists and numbers; tuples and sets become lists; keys
    become text. A float that is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``. An
    integer of more than 64 bits and any other object become the beginning of their ``repr``; so
    does what lies deeper than 64 lists and mappings. Lone surrogates in text become ``?``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value).encode(errors="replace").decode()
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() <= _LONGEST_INTEGER else shown(number)
    if isinstance(value, float):
        return _finite(float.__float__(value))
    if depth < _DEEPEST:
        if isinstance(value, Enum):
            return plain(value.value, depth + 1)
        if isinstance(value, Mapping):
            return {_key(key): plain(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain(each, depth + 1) for each in value]
        if callable(getattr(value, "tolist", None)):
            return plain(value.tolist(), depth + 1)
    return shown(value)


def shown(value: Any) -> str:
    """Beginning of the ``repr`` of a user's value, for a message."""
    try:
        text = repr(value).encode(errors="replace").decode()
    except Exception:  # of an integer of thousands of digits, or of a class that cannot do it
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _key(value: Any) -> str:
    key = plain(value, _DEEPEST - 1)
    return key if isinstance(key, str) else str(key)
