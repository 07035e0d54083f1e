"""The final answer of a response, for majority votes."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def final_answer(response: str) -> str | None:
    r"""The final answer of a response in a canonical spelling; None where it has none.

    The content of the last ``\boxed{}``; else what follows the last ``####`` on its line; else the
    last number; else the last line. Numbers lose separators and trailing zeros, other text the
    spaces around it.
    """
    boxed = _boxed(response)
    if boxed is not None:
        return _spelt(boxed)
    _, mark, rest = response.rpartition("####")
    if mark and rest.strip():
        return _spelt(rest.strip().splitlines()[0])
    numbers = _NUMBER.findall(response)
    if numbers:
        return _spelt(numbers[-1])
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else None


def _boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{}``, braces within it balanced."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index]
        end = start
    return None


def _spelt(text: str) -> str | None:
    text = text.strip().strip("$").strip().rstrip(".")
    if not _NUMBER.fullmatch(text):
        return text or None
    whole, point, decimals = text.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    digits = digits.lstrip("0") or "0"
    number = digits + (f".{decimals}" if point and decimals else "")
    return number if number == "0" else sign + number
