"""The final answer of a response, for majority votes."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def final_answer(response: str) -> str | None:
    r"""Return the final answer of a response in canonical form, or None for an empty response.

    The answer is the first of these that exists: the content of the last ``\boxed{}``, the rest
    of the line after the last ``####``, the last number, the last line. Numbers lose thousands
    separators and trailing zeros. Other text loses surrounding spaces.
    """
    boxed = _boxed(response)
    if boxed is not None:
        return _canonical(boxed)
    _, mark, answer = response.rpartition("####")
    if mark and answer.strip():
        return _canonical(answer.strip().splitlines()[0])
    numbers = _NUMBER.findall(response)
    if numbers:
        return _canonical(numbers[-1])
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else None


def _boxed(text: str) -> str | None:
    """Return the content of the last complete ``\\boxed{}``, with balanced braces."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index]
        end = start
    return None


def _canonical(text: str) -> str | None:
    text = text.strip().strip("$").strip().rstrip(".")
    if not _NUMBER.fullmatch(text):
        return text or None
    integer, _, decimals = text.replace(",", "").partition(".")
    sign = "-" if integer.startswith("-") else ""
    digits = integer.removeprefix("-").lstrip("0") or "0"
    number = f"{digits}.{decimals.rstrip('0')}".rstrip(".")
    return number if number == "0" else sign + number
