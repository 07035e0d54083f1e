"""Conversion of plain mappings into frozen dataclasses, validated by pydantic.

pydantic's errors become one ``ConfigError`` with a message per value. A message begins with the
dotted key and ends with a remedy.
"""

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Interval
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from aligner.compat.nemo_aligner import is_inert, remedy
from aligner.errors import ConfigError

T = TypeVar("T")

# Names of keys in other libraries, by the keys of this library that a message suggests for them.
_OTHER_NAMES = {
    "lr": ("learning_rate",),
    "max_length": ("max_new_tokens", "max_tokens"),
    "min_length": ("min_new_tokens",),
    "end_strings": ("stop", "stop_strings"),
    "use_greedy": ("do_sample",),
    "restore_from_path": ("model_name_or_path",),
    "explicit_log_dir": ("output_dir",),
    "max_epochs": ("num_train_epochs", "epochs"),
    "max_steps": ("steps",),
    "num_rollouts_per_prompt": ("num_generations",),
    "micro_batch_size": ("per_device_train_batch_size",),
    "global_batch_size": ("train_batch_size", "batch_size"),
    "adapter_dim": ("lora_rank", "r"),
    "alpha": ("lora_alpha",),
}
# Messages by type of pydantic's error. The errors of aligner/config/fields.py bring their message.
_TEXTS = {
    "missing": "required and not set. Set it in the YAML or as {key}=... on the command line",
    "bool_type": "expected true or false, got {got}",
    "int_type": "expected an integer, got {got}",
    "float_type": "expected a number, got {got}",
    "string_type": "expected a string, got {got}",
    "tuple_type": "expected a list, got {got}",
    "dict_type": "expected a mapping, got {got}",
    "dataclass_type": "expected a group of keys, got {got}. Write its keys below it ({keys})",
    "literal_error": "must be one of {names}, got {got}{near}",
    "too_long": "expected a list of {length} values, got {got}",
    "finite_number": "must be a finite number{range}, got {got}",
    **dict.fromkeys(
        ("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
        "must be{range}, got {got}",
    ),
}


def build(cls: type[T], values: Any, prefix: str = "") -> T:
    """Validate ``values`` and convert them to ``cls``, a dataclass, ``TypedDict`` or other type.

    ``prefix``: dotted key of ``values``, for messages. Raises a `ConfigError` that lists all
    invalid values, unknown keys and missing required keys. The value ``???`` counts as missing.
    """
    missing: list[str] = []
    if isinstance(values, Mapping):
        values = _without_inert(values, prefix, missing)
    problems = [f"{key}: {_TEXTS['missing'].format(key=key)}" for key in missing]
    try:
        context = {"download": isinstance(values, Mapping) and values.get("download") is True}
        (built,) = _adapter(cls).validate_python((values,), context=context)  # type: ignore[arg-type]
    except ValidationError as error:
        problems += _problems(cls, error.errors(include_url=False), prefix)
    refuse(problems)
    return built


def check_fields(values: Any) -> None:
    """Raise `ConfigError` if field values of a dataclass instance do not match their types."""
    hints, problems = field_types(type(values)), []
    for field in dataclasses.fields(values):
        try:
            build(hints[field.name], getattr(values, field.name), field.name)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` that lists the messages in ``problems``, if there are any."""
    messages = list(dict.fromkeys(problems))
    if len(messages) > 1:
        lines = "".join(f"\n- {message}" for message in messages)
        raise ConfigError(f"{len(messages)} settings cannot be used:{lines}")
    if messages:
        raise ConfigError(messages[0])


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # pydantic refuses a configuration for a dataclass, but passes one on from a tuple of it.
    rules = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    return TypeAdapter(types.GenericAlias(tuple, (cls,)), config=rules)  # type: ignore[arg-type]


def _without_inert(values: Mapping[Any, Any], prefix: str, missing: list[str]) -> dict[Any, Any]:
    """Return ``values`` without keys that have no effect. Keys with ``???`` go to ``missing``."""
    settings = {}
    for name, value in values.items():
        key = join(prefix, name)
        if value == "???":
            missing.append(key)
        elif not is_inert(key, value):
            is_section = isinstance(value, Mapping)
            settings[name] = _without_inert(value, key, missing) if is_section else value
    return settings


def _field_types(section: Any) -> Mapping[Any, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


field_types: Callable[[Any], Mapping[Any, Any]] = cache(_field_types)


def arms_of(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, recursively. A type that is no union is yielded itself."""
    if get_origin(hint) is Annotated:
        yield from arms_of(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for arm in get_args(hint):
            yield from arms_of(arm)
    else:
        yield hint


def section_in(hint: Any) -> type | None:
    """Return the dataclass or ``TypedDict`` in a type such as ``X | None``, or None."""
    arms = (arm for arm in arms_of(hint) if isinstance(arm, type))
    return next((arm for arm in arms if dataclasses.is_dataclass(arm) or is_typeddict(arm)), None)


def keys_below(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) for all fields below a dataclass, sections included."""
    for name, hint in field_types(cls).items():
        yield f"{prefix}{name}", hint
        section = section_in(hint)
        if section is not None:
            yield from keys_below(section, f"{prefix}{name}.")


def type_below(hint: Any, step: str | int) -> Any:
    """Return the type of the item ``step`` (a key or an index) in ``hint``, or None if unknown."""
    for arm in arms_of(hint):
        origin, args, section = get_origin(arm), get_args(arm), section_in(arm)
        if arm is Any:
            return Any
        if section is not None and step in field_types(section):
            return field_types(section)[step]
        if origin in (dict, Mapping):
            return args[1]
        if origin is tuple and isinstance(step, int):
            return args[0 if args[-1] is Ellipsis else step]
    return None


def unknown_key(key: str, known: list[str], prefix: str, elsewhere: Sequence[str] = ()) -> str:
    """Return the error message for an unknown dotted ``key``, with suggestions.

    ``known``: names of the keys in the section ``prefix``. ``elsewhere``: dotted keys of other
    sections, where the user may have meant to set the value.
    """
    if (text := remedy(key)) is not None:
        return f"{key}: {text}"
    name = key.rsplit(".", 1)[-1]
    names = (name, *(ours for ours, others in _OTHER_NAMES.items() if name in others))
    last_names = {option: option.rsplit(".", 1)[-1] for option in elsewhere}

    # The same name in another section, preferably below the same top-level section.
    similar = [option for option, last in last_names.items() if last in names]
    section = f"{key.split('.')[0]}."
    similar = [option for option in similar if option.startswith(section)] or similar

    # A similar name: first in this section, then in the others.
    if not similar:
        near = [option for option in names[1:] if option in known]
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        similar = [join(prefix, option) for option in near[:1]]
    if not similar:
        spelled = difflib.get_close_matches(name, sorted({*last_names.values()}), n=1, cutoff=0.8)
        similar = [option for option, last in last_names.items() if last in spelled]
    hint = f"Did you mean {' or '.join(similar[:3])}?" if similar else "Remove it or correct it."
    return f"{key}: unknown key. {hint} Keys of this section: {', '.join(sorted(known))}"


def _problems(cls: Any, errors: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[str]:
    # A value of a union has consecutive errors, one or more of each type.
    groups: list[list[_Problem]] = []
    for error in errors:
        problem = _problem(cls, error, prefix)
        if groups and re.match(rf"{re.escape(groups[-1][0].key)}([.\[]|$)", problem.key):
            groups[-1].append(problem)
        else:
            groups.append([problem])
    for group in groups:
        if unknown := [problem for problem in group if problem.is_unknown]:
            yield from (problem.text for problem in unknown)
            continue
        # Prefer the errors of types that expected a value of this kind, then those of inner keys.
        key, _, other_kind, _ = min(group, key=lambda error: (error.is_other_kind, -len(error.key)))
        chosen = [error for error in group if error.key == key]
        texts = [error.text for error in chosen if error.is_other_kind == other_kind]
        text = ", or ".join(dict.fromkeys(texts))
        yield text if text.startswith(f"{key}=") else f"{key or 'the configuration'}: {text}"


class _Problem(NamedTuple):
    key: str
    text: str
    is_other_kind: bool  # the value is of another kind than expected, such as text for a number
    is_unknown: bool  # the key does not exist


def _problem(cls: Any, error: Mapping[str, Any], prefix: str) -> _Problem:
    kind, path = error["type"], error["loc"][1:]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        section_key, hint = _key_and_type(cls, path[:-1], prefix)
        section = section_in(hint)
        assert section is not None, hint
        key = join(section_key, path[-1])
        return _Problem(key, unknown_key(key, list(field_types(section)), section_key), False, True)
    if kind == "missing" and isinstance(path[-1], int):  # a list that is too short
        kind, path = "too_long", path[:-1]

    # An invalid value.
    key, hint = _key_and_type(cls, path, prefix)
    if kind in _TEXTS:
        text = _TEXTS[kind].format(**_words(error, key, hint))
    else:
        text = error["msg"].replace("{key}", key).replace("{got}", _show(error["input"]))
    return _Problem(key, text, kind.endswith(("_type", "literal_error")), False)


def _key_and_type(hint: Any, path: Sequence[str | int], key: str) -> tuple[str, Any]:
    """Return (dotted key, type) of the value at ``path`` below ``key``, whose type is ``hint``."""
    for step in path:
        below = type_below(hint, step)
        if below is not None:
            key = f"{key}[{step}]" if isinstance(step, int) else join(key, step)
            hint = below
    return key, hint


def _words(error: Mapping[str, Any], key: str, hint: Any) -> dict[str, Any]:
    section = section_in(hint)
    names = re.findall("'(.*?)'", error.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(str(error["input"]), names, n=1)
    lengths = [len(get_args(arm)) for arm in arms_of(hint) if get_origin(arm) is tuple]
    return {
        "key": key,
        "got": _show(error["input"]),
        "keys": "" if section is None else ", ".join(field_types(section)),
        "names": ", ".join(names),
        "near": f". Did you mean {near[0]}?" if near else "",
        "length": lengths[0] if lengths else 0,
        "range": _range(hint),
    }


def _range(hint: Any) -> str:
    """Return the interval of a number as text, such as " at least 0". Empty without an interval."""
    if isinstance(hint, Interval):
        low: Any = hint.ge if hint.gt is None else hint.gt
        high: Any = hint.le if hint.lt is None else hint.lt
        if high is not None:
            return f" between {low:g} and {high:g}{'' if hint.lt is None else ' (exclusive)'}"
        return f" at least {low:g}" if hint.gt is None else f" greater than {low:g}"
    return next(filter(None, map(_range, get_args(hint))), "")


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass as nested JSON values. Required keys are left out."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), default_of(field)
        if default is not dataclasses.MISSING:
            defaults[field.name] = default
        elif dataclasses.is_dataclass(value):
            defaults[field.name] = defaults_of(value)
    return json.loads(json.dumps(defaults, default=dataclasses.asdict))


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, or ``dataclasses.MISSING`` if the field is required."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def without_new_defaults(
    current: Mapping[str, Any], saved: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``current`` without default values of keys that ``saved`` does not contain.

    Such keys are newer than the saved configuration. If a section is null in ``saved``, the user
    had switched it off, so its keys are kept.
    """
    result: dict[str, Any] = {}
    for key, value in current.items():
        if key not in saved and key in defaults and value == defaults[key]:
            continue
        section = saved.get(key, {})
        if isinstance(value, Mapping) and isinstance(section, Mapping):
            value = without_new_defaults(value, section, defaults.get(key) or {})
        result[key] = value
    return result


def join(prefix: str, key: Any) -> str:
    """Return ``prefix.key``, or ``key`` if the prefix is empty."""
    return f"{prefix}.{key}" if prefix else str(key)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number that is too long to show"
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{text} ({type(value).__name__})"
