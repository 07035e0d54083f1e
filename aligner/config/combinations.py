"""Rules that involve several values of a configuration.

A section's method ``problems(key, run)`` yields an error message for each broken rule. ``key`` is
the section's dotted key, and ``run`` the complete configuration. `ReadIf` in the type of a field
states which runs read the field.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from aligner.config.parse import defaults_of, field_types, join, section_in


@dataclasses.dataclass(frozen=True)
class ReadIf:
    """Condition under which a field has an effect. Otherwise only its default value is accepted."""

    condition: Callable[[Any], bool]  # of the complete configuration
    reason: str  # why others do not read it, after the key and value in a message


def broken_rules(section: Any, key: str, run: Any) -> Iterator[str]:
    """Yield the error messages of the method ``problems`` of a section and of its subsections."""
    if hasattr(section, "problems"):
        yield from section.problems(key, run)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from broken_rules(value, join(key, field.name), run)


def unread_options(run: Any) -> Iterator[str]:
    """Yield an error message for each option that is set but has no effect in the run."""
    yield from _unread(type(run), "", run.as_dict(), defaults_of(run), run)


def _unread(
    cls: type, key: str, values: Mapping[str, Any], defaults: Mapping[str, Any], run: Any
) -> Iterator[str]:
    for name, hint in field_types(cls).items():
        below, value, default = join(key, name), values[name], defaults.get(name)
        for rule in get_args(hint):
            if isinstance(rule, ReadIf) and not rule.condition(run):
                for option, setting in changed_keys(below, value, default):
                    yield f"{option}={setting!r} {rule.reason}. This run ignores it. Leave it out"
        if isinstance(value, Mapping) and (section := section_in(hint)) is not None:
            yield from _unread(section, below, value, default or {}, run)


def changed_keys(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value at or below ``key`` that is not its default."""
    if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
        for name in value:
            yield from changed_keys(join(key, name), value[name], default.get(name))
    elif value != default:
        yield key, value


def multiples_near(number: int, step: int) -> str:
    """Return the positive multiples of ``step`` next to ``number`` as text, such as "48 or 96"."""
    below, above = number // step * step, -(-number // step) * step
    return f"{below} or {above}" if below else str(above)
