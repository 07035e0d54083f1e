"""Defaults of a run's keys, by which a key that a later version added is known."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


def defaults_of(config: Any) -> dict[str, Any]:
    """Defaults of the keys of a configuration, as JSON has them; keys without one are left out.

    ``config``: a dataclass. The sections that it must be given are looked into.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif dataclasses.is_dataclass(value):
            found[field.name] = defaults_of(value)
    return json.loads(json.dumps(found, default=dataclasses.asdict))


def without_new_defaults(
    now: Mapping[str, Any], before: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """``now`` without the keys that ``before`` lacks and that have their default.

    All three are configurations as nested mappings. A section that ``before`` has as null was
    switched off, so that its keys stay.
    """
    kept: dict[str, Any] = {}
    for key, value in now.items():
        is_new, default = key not in before, defaults.get(key)
        if is_new and key in defaults and value == default:
            continue
        earlier = {} if is_new else before[key]
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            inner = default if isinstance(default, Mapping) else {}
            value = without_new_defaults(value, earlier, inner)
        kept[key] = value
    return kept
