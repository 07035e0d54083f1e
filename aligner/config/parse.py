"""Build frozen dataclasses out of plain mappings, refusing what does not fit.

pydantic validates them. Its errors become one ``ConfigError`` with a message for each value, which
starts with the full dotted key and ends with a remedy.
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

from aligner.errors import ConfigError
from aligner.foreign_keys import is_inert, remedy

T = TypeVar("T")

# What other libraries call a key that has another name here; suggested where it is known.
_OTHER_NAMES = {
    "learning_rate": ("lr",),
    "max_new_tokens": ("max_length",),
    "max_tokens": ("max_length",),
    "min_new_tokens": ("min_length",),
    "stop": ("end_strings",),
    "stop_strings": ("end_strings",),
    "do_sample": ("use_greedy", "greedy"),
    "model_name_or_path": ("restore_from_path",),
    "output_dir": ("explicit_log_dir",),
    "num_train_epochs": ("max_epochs",),
    "num_generations": ("num_rollouts_per_prompt",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "train_batch_size": ("global_batch_size",),
    "batch_size": ("global_batch_size",),
    "epochs": ("max_epochs",),
    "steps": ("max_steps",),
    "lora_rank": ("adapter_dim",),
    "r": ("adapter_dim",),
    "lora_alpha": ("alpha",),
}
# What is said of pydantic's errors, by their type; those of aligner/config/fields.py say it.
_TEXTS = {
    "missing": "required and not set. Give it in the YAML or as {key}=... on the command line",
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
    """Make a ``cls`` from ``values``; ``prefix`` is the dotted key of ``values`` itself.

    ``cls``: a dataclass; a ``TypedDict``, of which any key may be absent; or a field's type.

    Raises:
        ConfigError: names every value that does not fit, every unknown key, and every value that is
            required and missing (also ``???``, omegaconf's mark of a missing value).
    """
    missing: list[str] = []
    if isinstance(values, Mapping):
        values = _given(values, prefix, missing)
    problems = [f"{key}: {_TEXTS['missing'].format(key=key)}" for key in missing]
    try:
        (built,) = _adapter(cls).validate_python((values,))  # type: ignore[arg-type]
    except ValidationError as error:
        problems += _problems(cls, error.errors(include_url=False), prefix)
    refuse(problems)
    return built


def check_fields(values: Any) -> None:
    """Refuse a dataclass made in code whose values do not fit the types of its fields."""
    hints, problems = field_types(type(values)), []
    for field in dataclasses.fields(values):
        try:
            build(hints[field.name], getattr(values, field.name), field.name)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)


def refuse(problems: Iterable[str]) -> None:
    """Raise one ``ConfigError`` with all messages; do nothing if there are none."""
    messages = list(dict.fromkeys(problems))
    if len(messages) > 1:
        lines = "".join(f"\n- {message}" for message in messages)
        raise ConfigError(f"{len(messages)} settings cannot be used:{lines}")
    if messages:
        raise ConfigError(messages[0])


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # A tuple of it, as pydantic refuses rules for a dataclass itself, and hands them down to one.
    rules = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    return TypeAdapter(types.GenericAlias(tuple, (cls,)), config=rules)  # type: ignore[arg-type]


def _given(values: Mapping[Any, Any], prefix: str, missing: list[str]) -> dict[Any, Any]:
    """``values`` without keys that change nothing, and missing ones, which ``missing`` gets."""
    given = {}
    for name, value in values.items():
        key = join(prefix, name)
        if value == "???":
            missing.append(key)
        elif not is_inert(key, value):
            given[name] = _given(value, key, missing) if isinstance(value, Mapping) else value
    return given


def _field_types(section: Any) -> Mapping[Any, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


field_types: Callable[[Any], Mapping[Any, Any]] = cache(_field_types)
"""Resolved type of each field of a dataclass, or of each key of a ``TypedDict``, in their order."""


def arms_of(hint: Any) -> Iterator[Any]:
    """The types that a value may have: ``hint``, or the arms of a union."""
    if get_origin(hint) is Annotated:
        yield from arms_of(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for arm in get_args(hint):
            yield from arms_of(arm)
    else:
        yield hint


def section_in(hint: Any) -> type | None:
    """The dataclass, or ``TypedDict``, of ``X`` or ``X | None``.

    None means the value is no section.
    """
    arms = (arm for arm in arms_of(hint) if isinstance(arm, type))
    return next((arm for arm in arms if dataclasses.is_dataclass(arm) or is_typeddict(arm)), None)


def keys_below(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a dataclass, sections included, and the type of its value."""
    for name, hint in field_types(cls).items():
        yield f"{prefix}{name}", hint
        section = section_in(hint)
        if section is not None:
            yield from keys_below(section, f"{prefix}{name}.")


def type_below(hint: Any, step: str | int) -> Any:
    """Type of the value at a key or an index of a ``hint``. None means it has no such."""
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
    """Message for a key that no dataclass has, with the nearest that one has.

    Args:
        key: the dotted key as it was given.
        known: the names that are known where it stands.
        prefix: the dotted key of that place.
        elsewhere: dotted keys of other places, where its last name may belong.
    """
    if (other := remedy(key)) is not None:
        return f"{key}: {other}"
    name = key.rsplit(".", 1)[-1]
    near = [other for other in _OTHER_NAMES.get(name, ()) if other in known]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = (name, *_OTHER_NAMES.get(name, ()))
    places = [other for other in elsewhere if other.rsplit(".", 1)[-1] in names]
    section = f"{key.split('.')[0]}."
    places = [other for other in places if other.startswith(section)] or places
    if near and not places:
        places = [join(prefix, near[0])]
    if not places:
        lasts = {other.rsplit(".", 1)[-1] for other in elsewhere}
        spelt = difflib.get_close_matches(name, sorted(lasts), n=1, cutoff=0.8)
        places = [other for other in elsewhere if other.rsplit(".", 1)[-1] in spelt]
    hint = (
        f"did you mean {' or '.join(places[:3])}?" if places else "remove it or correct its name."
    )
    return f"{key}: unknown key; {hint} Keys here: {', '.join(sorted(known))}"


def _problems(cls: Any, errors: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[str]:
    """Yield a message for each unknown key and for each value that does not fit."""
    groups: list[list[_Problem]] = []  # a value of a union has errors of all its types
    for error in errors:
        problem = _problem(cls, error, prefix)
        first = groups[-1][0].key if groups else None
        is_same = first is not None and re.match(rf"{re.escape(first)}([.\[]|$)", problem.key)
        if is_same:
            groups[-1].append(problem)
        else:
            groups.append([problem])
    for group in groups:
        if unknown := [problem for problem in group if problem.is_unknown]:
            yield from (problem.text for problem in unknown)
            continue
        # The errors of the types that expected the kind of value that was given say most.
        key, _, other_kind, _ = min(group, key=lambda each: (each.is_other_kind, -len(each.key)))
        texts = [each.text for each in group if (each.key, each.is_other_kind) == (key, other_kind)]
        text = "; or ".join(dict.fromkeys(texts))
        yield text if text.startswith(f"{key}=") else f"{key or 'the configuration'}: {text}"


class _Problem(NamedTuple):
    """Error of pydantic about one value."""

    key: str
    text: str
    is_other_kind: bool  # the value is of another kind than expected, such as text for a number
    is_unknown: bool  # there is no such key


def _problem(cls: Any, error: Mapping[str, Any], prefix: str) -> _Problem:
    kind, path = error["type"], error["loc"][1:]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        place, hint = _place(cls, path[:-1], prefix)
        section = section_in(hint)
        assert section is not None, hint
        key = join(place, path[-1])
        return _Problem(key, unknown_key(key, list(field_types(section)), place), False, True)
    if kind == "missing" and isinstance(path[-1], int):  # of a list that ends too early
        kind, path = "too_long", path[:-1]
    key, hint = _place(cls, path, prefix)
    if kind in _TEXTS:
        text = _TEXTS[kind].format(**_words(error, key, hint))
    else:
        text = error["msg"].replace("{key}", key).replace("{got}", _show(error["input"]))
    return _Problem(key, text, kind.endswith(("_type", "literal_error")), False)


def _place(hint: Any, path: Sequence[str | int], key: str) -> tuple[str, Any]:
    """Dotted key and type at the end of a path of pydantic's, which names arms of unions, too."""
    for step in path:
        below = type_below(hint, step)
        if below is not None:
            key = f"{key}[{step}]" if isinstance(step, int) else join(key, step)
            hint = below
    return key, hint


def _words(error: Mapping[str, Any], key: str, hint: Any) -> dict[str, Any]:
    """Words for the placeholders of ``_TEXTS``."""
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
    """Interval of a number, behind "must be"; empty: any will do."""
    if isinstance(hint, Interval):
        low: Any = hint.ge if hint.gt is None else hint.gt
        high: Any = hint.le if hint.lt is None else hint.lt
        if high is not None:
            return f" between {low:g} and {high:g}{'' if hint.lt is None else ' (exclusive)'}"
        return f" at least {low:g}" if hint.gt is None else f" greater than {low:g}"
    return next(filter(None, map(_range, get_args(hint))), "")


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


def join(prefix: str, key: Any) -> str:
    """Dotted key of ``key`` below ``prefix``, which may be empty."""
    return f"{prefix}.{key}" if prefix else str(key)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "too long a number to show"
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{text} ({type(value).__name__})"
