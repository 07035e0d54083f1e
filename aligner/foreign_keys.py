"""Formatting of configuration keys and values for tables and command lines."""

import re
from collections.abc import Mapping
from typing import Any

IGNORED: dict[str, None] = {}  # keys without effect in this run, for the start-up report


def table(rows: list[tuple[str, Any, str]]) -> str:
    """Return (key, value, remedy) of each row as lines of a text table with a header."""
    cells = [("their key", "value", "what to use")]
    cells += [(key, shown(value)[:40], remedy) for key, value, remedy in rows]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {use}" for key, value, use in cells
    )


def shown(value: Any) -> str:
    """Return a value as text for messages, such as ``null``, ``true`` or ``[0.5,2]``."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def as_override(value: Any) -> str:
    """Return a value in hydra's syntax, for an argument ``key=value`` of a command."""
    if getattr(value, "shape", None) == ():  # a NumPy scalar
        value = value.item()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{as_override(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z_./][\w./:-]*", text)
    if is_plain and text.lower() not in ("null", "true", "false"):
        return text
    if re.search(r"[\n\r\t]", text):  # written \\n in double quotes, as in YAML
        quote, names = '"', {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    else:
        quote, names = "'", {}
    # A backslash is doubled before a quotation mark only. A \ keeps ${ from being interpolated.
    text = re.sub(rf"(\\*)({quote}|$)", lambda m: m[1] * 2 + (m[2] and f"\\{m[2]}"), text)
    for character, name in {**names, "${": "\\${"}.items():
        text = text.replace(character, name)
    return f"{quote}{text}{quote}"
