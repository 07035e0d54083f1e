"""Imports by name: a user's function or class, and packages without what they bring along.

For a user's code the current directory is searched as well, wherever the script that runs stands.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.user_files import import_file

Kind = Literal["function", "class"]


def load_function(name: str, *, key: str, kind: Kind = "function") -> Callable[..., Any]:
    """The callable that ``name`` stands for.

    Args:
        name: ``package.module:function``, ``package.module.function`` or
            ``path/to/file.py:function``; a class serves as well.
        key: the configuration key that held it, for the error message.
        kind: what the message calls it.

    Raises:
        ConfigError: nothing callable of that name can be imported.
    """
    place, attribute = _split(name, key)
    module = _import_place(place, name, key)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        offered = ", ".join(_functions_of(module, kind)) or "none"
        kinds = {"function": "functions", "class": "classes"}[kind]
        raise ConfigError(
            f"{key}={name!r}: {place} has no {kind} {attribute!r} (its {kinds}: {offered})"
        )
    return found


def import_without(module: str, *packages: str) -> None:
    """Import ``module`` as if these ``packages`` were not installed.

    For a module that imports large packages if it finds them, for features that are not used here.
    Later imports find the packages, and those that are imported already stay so. Does nothing where
    ``module`` is imported already.
    """
    if module in sys.modules:
        return
    finder = _Absent(set(packages) - sys.modules.keys())
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


class _Absent(DistributionFinder):
    """Finds packages absent, whatever the finders after it have."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse the packages and what is in them; say nothing of others."""
        del path, target
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Refuse the packages' versions; say nothing of others."""
        if context is not None and context.name in self._packages:
            raise PackageNotFoundError(context.name)
        return ()


def check_call(
    call: Callable[..., Any], keywords: Iterable[str], what: str, remedy: str, positional: int = 0
) -> None:
    """Refuse a callable that cannot be called with this many arguments and these keywords.

    Args:
        call: the callable.
        keywords: names of what is passed by keyword.
        what: how the message begins: the configuration key, its value and what is called.
        remedy: how it ends.
        positional: number of arguments passed by position.

    Raises:
        ConfigError: its signature does not fit. One that cannot be read is taken to fit.
    """
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a function of C
        return
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; its signature is {signature}. {remedy}") from error


def named_by(function: Callable[..., Any], offered: Iterable[str]) -> set[str]:
    """Names of ``offered`` that a signature takes by keyword; all of them if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return set()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return set(offered)
    return {one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY} & {*offered}


def _split(name: str, key: str) -> tuple[str, str]:
    place, separator, attribute = name.rpartition(":")
    if not separator:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute or (place.endswith(".py") and not separator):
        raise ConfigError(
            f"{key}={name!r} must look like package.module:function or path/to/file.py:function"
        )
    return place, attribute


def _import_place(place: str, name: str, key: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"{key}={name!r}: there is no file {path}")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # `python examples/SCRIPT.py` searches only the folder of the script
    try:
        return import_file(path) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={name!r}: no module named {error.name!r}. Give path/to/file.py:NAME, run from "
            f"the folder that holds the module (now {here}), or add that to PYTHONPATH"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{key}={name!r}: importing {place} failed with {type(error).__name__}: {error}"
        ) from error


def _functions_of(module: ModuleType, kind: Kind) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value)
        and (kind == "function" or isinstance(value, type))
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


# Of a function's own error text, which passes through a pipe, to every rank and the console.
_MOST_CHARACTERS = 2000


def describe_exception(error: BaseException) -> str:
    """``ZeroDivisionError: division by zero (rewards.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{place}"


def text_of(error: BaseException) -> str:
    """The beginning of its text, whatever ``__str__`` does."""
    try:
        text = str(error)
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}… and {more} characters more"
