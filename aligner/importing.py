"""Import of users' functions and classes, and of modules without optional packages.

User code is also searched in the current directory.
"""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from aligner.errors import AlignerError, ConfigError
from aligner.user_files import import_file

Kind = Literal["function", "class"]


def load_function(name: str, *, key: str, kind: Kind = "function") -> Callable[..., Any]:
    """Import the function or class ``name`` and return it.

    ``name``: ``package.module:function``, ``package.module.function`` or
    ``path/to/file.py:function``. ``key``: configuration key for the error message. ``kind``:
    "function" or "class". Raises `ConfigError` if the object cannot be imported.
    """
    module_path, attribute = _split(name, key)
    module = _import_module(module_path, name, key)
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        kinds = {"function": "functions", "class": "classes"}[kind]
        raise ConfigError(
            f"{key}={name!r}: {module_path} has no {kind} {attribute!r}. Its {kinds}: "
            f"{', '.join(_functions_of(module, kind)) or 'none'}"
        )
    return value


def import_without(module: str, *packages: str) -> None:
    """Import ``module`` while optional ``packages`` cannot be imported, which saves time.

    This does not affect packages that are already imported, nor later imports.
    """
    if module in sys.modules:
        return
    finder = _HidingFinder(set(packages) - sys.modules.keys())
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


class _HidingFinder(DistributionFinder):
    """Import finder that makes imports of some packages fail."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        if context is not None and context.name in self._packages:
            raise PackageNotFoundError(context.name)
        return ()


def check_call(
    call: Callable[..., Any],
    keywords: Iterable[str],
    subject: str,
    remedy: str,
    positional: int = 0,
) -> None:
    """Raise `ConfigError` if ``call`` does not accept arguments with these names.

    ``keywords``: names of keyword arguments. ``positional``: number of positional arguments. The
    message is ``subject`` (configuration key and value), the problem, and ``remedy``. Functions
    without a known signature are accepted.
    """
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a function of C
        return
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(f"{subject}: {error}. The signature is {signature}. {remedy}") from error


def construct(
    factory: Callable[..., Any], kwargs: Mapping[str, Any], name: str, remedy: str
) -> Any:
    """Return ``factory(**kwargs)`` for a user's class. Raises `ConfigError` if this fails.

    ``name``: start of the error message, the configuration key and its value. ``remedy``: end of
    the message if the signature does not match.
    """
    check_call(factory, kwargs, f"{name}: its constructor", remedy)
    with user_errors(name, f"its constructor with the arguments {dict(kwargs)}"):
        return factory(**kwargs)


@contextlib.contextmanager
def user_errors(name: str, call: str) -> Iterator[None]:
    """Context manager: convert exceptions of user code to `ConfigError`.

    The message contains ``name`` (configuration key and value), ``call`` (the code that raised),
    and the exception with file and line.
    """
    try:
        yield
    except Exception as error:
        message = f"{name}: {call} raised {describe_exception(error)}"
        if isinstance(error, AlignerError):
            message = str(error) if str(error).startswith(name) else f"{name}: {error}"
        raise ConfigError(message) from error


def accepted_keywords(function: Callable[..., Any], names: Iterable[str]) -> set[str]:
    """Return the elements of ``names`` that ``function`` accepts as keyword arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    return {item.name for item in parameters if item.kind is not positional_only} & {*names}


def _split(name: str, key: str) -> tuple[str, str]:
    module_path, separator, attribute = name.rpartition(":")
    if not separator:
        module_path, _, attribute = name.rpartition(".")
    if not module_path or not attribute or (module_path.endswith(".py") and not separator):
        raise ConfigError(
            f"{key}={name!r} is not an import path. Write package.module:function or "
            "path/to/file.py:function"
        )
    return module_path, attribute


def _import_module(module_path: str, name: str, key: str) -> ModuleType:
    path = Path(module_path).expanduser().resolve() if module_path.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ConfigError(f"{key}={name!r}: the file {path} does not exist. Correct the path")

    # Import the module, also from the current directory.
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # `python examples/SCRIPT.py` searches only the script's folder
    try:
        return importlib.import_module(module_path) if path is None else import_file(path)
    except Exception as error:
        problem = f"importing {module_path} failed with {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            problem = f"no module named {error.name!r}. Give path/to/file.py:NAME, run from the "
            problem += f"folder of the module (now {folder}), or add that folder to PYTHONPATH"
        raise ConfigError(f"{key}={name!r}: {problem}") from error


def _functions_of(module: ModuleType, kind: Kind) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value)
        and (kind == "function" or isinstance(value, type))
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


_MOST_CHARACTERS = 2000  # maximum length of an error's text, which is sent to every rank


def describe_exception(error: BaseException) -> str:
    """Return text such as ``ZeroDivisionError: division by zero (rewards.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    position = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{position}"


def text_of(error: BaseException) -> str:
    """Return the first part of an error's text, even if its ``__str__`` raises."""
    try:
        text = str(error)
    except Exception as failure:
        return f"(the text is not available: {type(failure).__name__})"
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}… and {more} characters more"
