"""Configuration keys of other libraries: questions of the loader, answered by registered tables.

`aligner.compat` has the tables and registers them when `aligner` is imported, so that the loader
names no other library.
"""

from typing import Any, Protocol

IGNORED: dict[str, None] = {}  # keys that were given and change no result: for the start-up report


class KeyTable(Protocol):
    """Keys of one library."""

    def remedy(self, key: str, /) -> str | None:
        """Text that says what to use instead of a dotted key; None for a key not in the table."""
        ...

    def is_inert(self, key: str, value: Any, /) -> bool:
        """Return whether ``key: value`` asks for nothing but what is done anyway."""
        ...


_tables: list[KeyTable] = []


def register(keys: KeyTable) -> None:
    """Add the keys of one library; a module with the two functions is such a table."""
    if keys not in _tables:
        _tables.append(keys)


def remedy(key: str) -> str | None:
    """Text of the first table that has the key; None if none has it."""
    return next((text for keys in _tables if (text := keys.remedy(key)) is not None), None)


def is_inert(key: str, value: Any) -> bool:
    """Return whether a table accepts ``key: value`` because it is so anyway."""
    return any(keys.is_inert(key, value) for keys in _tables)


def table(rows: list[tuple[str, Any, str]]) -> str:
    """Align rows of "their key, value, what to use" below those titles."""
    cells = [("their key", "value", "what to use")]
    cells += [(key, shown(value)[:40], remedy) for key, value, remedy in rows]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {use}" for key, value, use in cells
    )


def shown(value: Any) -> str:
    """A value as the command line has it: ``null``, ``true``, ``[0.5,2]``, text without quotes."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
