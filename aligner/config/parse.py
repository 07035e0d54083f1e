"""Build frozen dataclasses out of plain mappings, refusing what does not fit.

Every refusal is a ``ConfigError`` that starts with the full dotted key and ends with a remedy.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from aligner.config.elsewhere.nemo_aligner import is_inert, remedy
from aligner.config.fields import Aliases, Names, NotEmpty, Range, Refused
from aligner.errors import ConfigError

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
    "lora_rank": ("adapter_dim",),
    "r": ("adapter_dim",),
    "lora_alpha": ("alpha",),
}


def build(cls: type[T], values: Any, prefix: str = "") -> T:
    """Make a ``cls`` from ``values``; ``prefix`` is the dotted key of the mapping itself.

    ``cls``: a dataclass; or a ``TypedDict``, of which any key may be absent.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{prefix or 'the configuration'}: expected a group of keys, got {_show(values)}; "
            f"write its keys below it ({', '.join(field_types(cls))})"
        )
    hints = field_types(cls)
    fields = () if is_typeddict(cls) else dataclasses.fields(cls)  # type: ignore[arg-type]
    derived = {field.name for field in fields if field.metadata.get("derived")}
    values = {key: item for key, item in values.items() if item is not None or key not in derived}
    for key in values:
        if key not in hints and not is_inert(_join(prefix, str(key)), values[key]):
            raise ConfigError(unknown_key(_join(prefix, str(key)), list(hints), prefix))
    values = {key: item for key, item in values.items() if key in hints}
    missing = [field.name for field in fields if field.name not in values and _is_required(field)]
    if missing:
        raise ConfigError(
            f"{_join(prefix, missing[0])}: required and not set; "
            f"give it in the YAML or as {_join(prefix, missing[0])}=... on the command line"
        )
    return cls(
        **{key: convert(hints[key], value, _join(prefix, key)) for key, value in values.items()}
    )


def field_types(cls: type) -> dict[str, Any]:
    """Resolved type of each field of a dataclass, annotations kept, in order of definition.

    Of a ``TypedDict`` that of each key.
    """
    hints = get_type_hints(cls, include_extras=True)
    if is_typeddict(cls):
        return hints
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


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
    """The dataclass of ``X`` or ``X | None``; None: the value is no section."""
    arms = (arm for arm in arms_of(hint) if isinstance(arm, type))
    return next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)


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
    places = [other for other in elsewhere if other.rsplit(".", 1)[-1] == name]
    section = f"{key.split('.')[0]}."
    places = [other for other in places if other.startswith(section)] or places
    if near and not places:
        places = [_join(prefix, near[0])]
    hint = (
        f"did you mean {' or '.join(places[:3])}?" if places else "remove it or correct its name."
    )
    return f"{key}: unknown key; {hint} Keys here: {', '.join(sorted(known))}"


def convert(hint: Any, value: Any, key: str) -> Any:
    """``value`` as the type ``hint`` describes, or a ``ConfigError`` that names ``key``."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _convert_annotated(hint, value, key)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, key)
    if origin is Literal:
        return _convert_literal(hint, value, key)
    if origin is tuple:
        return _convert_tuple(hint, value, key)
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return build(hint, value, key)
    if origin in (dict, Mapping) or hint is dict:
        return _convert_mapping(hint, value, key)
    if hint is Any:
        return value
    return _convert_scalar(hint, value, key)


def _convert_scalar(hint: type, value: Any, key: str) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, key)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}: must fit 64 bits, got {_show(value)}")
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    raise ConfigError(f"{key}: expected {names[hint]}, got {_show(value)}")


def _finite(value: float, key: str) -> float:
    """Refuse infinity and NaN, which have no use in a sum; null or 0 of a key means "no limit"."""
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{key}: must be a finite number, got {_show(value)}")
    return number


def _convert_annotated(hint: Any, value: Any, key: str) -> Any:
    inner, *constraints = get_args(hint)
    for constraint in constraints:
        if isinstance(constraint, Aliases):
            value = constraint.resolve(value)
        elif isinstance(constraint, Refused) and (reason := constraint.reason(value)) is not None:
            raise ConfigError(f"{key}={value}: {reason}")
        elif isinstance(constraint, NotEmpty) and isinstance(value, str) and not value.strip():
            raise ConfigError(f"{key}: empty, got {_show(value)}; give {constraint.wanted}")
        elif isinstance(constraint, Names) and not constraint.is_path(str(value)):
            value = _convert_name(constraint, value, key)
    ranges = [constraint for constraint in constraints if isinstance(constraint, Range)]
    if inner is float and isinstance(value, float) and not math.isfinite(value) and ranges:
        raise ConfigError(f"{key}: must be a finite number {ranges[0]}, got {_show(value)}")
    converted = convert(inner, value, key)
    for allowed in ranges:
        if not allowed.contains(converted):
            raise ConfigError(f"{key}: must be {allowed}, got {_show(value)}")
    return converted


def _convert_name(known: Names, value: Any, key: str) -> str:
    try:
        return _convert_literal(Literal[known.names], value, key)
    except ConfigError as error:
        if not known.or_path:
            raise
        raise ConfigError(f"{error}. A function of your own is package.module:function") from None


def _convert_union(hint: Any, value: Any, key: str) -> Any:
    arms = get_args(hint)
    if value is None:
        if type(None) in arms:
            return None
        raise ConfigError(f"{key}: null is not allowed; give it a value")
    problems: list[ConfigError] = []
    candidates = [arm for arm in arms if arm is not type(None)]
    candidates = [arm for arm in candidates if _is_of_kind(arm, value)] or candidates
    for arm in candidates:
        try:
            return convert(arm, value, key)
        except ConfigError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    reasons = [str(problem).removeprefix(f"{key}: ") for problem in problems]
    raise ConfigError(f"{key}: {'; or '.join(reasons)}")


def _is_of_kind(arm: Any, value: Any) -> bool:
    """Return whether a text, or a list, was meant for ``arm``, which then reports the error."""
    inner = get_args(arm)[0] if get_origin(arm) is Annotated else arm
    if isinstance(value, str):
        return inner is str
    return isinstance(value, (list, tuple)) and get_origin(inner) is tuple


def _convert_literal(hint: Any, value: Any, key: str) -> Any:
    allowed = get_args(hint)
    # `precision: 32` in YAML is a number; the allowed value is the string "32".
    for option in allowed:
        if value == option or (not isinstance(value, bool) and str(value) == str(option)):
            return option
    near = difflib.get_close_matches(str(value), [str(option) for option in allowed], n=1)
    hint_text = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{key}: must be one of {', '.join(str(option) for option in allowed)}, "
        f"got {_show(value)}{hint_text}"
    )


def _convert_tuple(hint: Any, value: Any, key: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key}: expected a list, got {_show(value)}")
    arms = get_args(hint)
    if len(arms) == 2 and arms[1] is Ellipsis:
        arms = (arms[0],) * len(value)
    if len(value) != len(arms):
        raise ConfigError(f"{key}: expected a list of {len(arms)} values, got {_show(value)}")
    return tuple(
        convert(arm, item, f"{key}[{index}]")
        for index, (arm, item) in enumerate(zip(arms, value, strict=True))
    )


def _convert_mapping(hint: Any, value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: expected a mapping, got {_show(value)}")
    kind = (get_args(hint) or (str, Any))[1]
    return {str(name): convert(kind, item, f"{key}.{name}") for name, item in value.items()}


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _show(value: Any) -> str:
    if value is None:
        return "null"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "too long a number to show"
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{text} ({type(value).__name__})"
