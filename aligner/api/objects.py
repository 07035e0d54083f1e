"""Writes functions, classes and rows to files, whose paths are values of configuration keys.

An importable function or class becomes its path, ``package.module:name``. Any other object, such as
a function of a notebook, becomes a pickle and a module that loads the pickle. The module contains
the source as a comment. A run that is continued compares the module, and so notices changed code.
"""

import hashlib
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from aligner.errors import ConfigError, DataError, raised_as

_PLAIN = (str, int, float, bool, type(None), tuple, list, dict)


def as_setting(key: str, value: Any, folder: Path) -> Any:
    """Return ``value`` with import paths in place of functions and classes.

    ``key``: configuration key of the value. Objects that no path imports are pickled to
    ``folder``. Raises `ConfigError` if pickling fails.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: as_setting(f"{key}.{name}", item, folder) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_setting(f"{key}.{i}", item, folder) for i, item in enumerate(value)]
    if callable(value):
        return _importable_path(value) or _write_object(key, value, folder)
    return value


def _importable_path(value: Any) -> str | None:
    """Return ``module:name`` if another process can import ``value``, else None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "__main__") or name is None or "<" in name:
        return None
    try:
        loaded: Any = importlib.import_module(module)
        for part in name.split("."):
            loaded = getattr(loaded, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if loaded is value and _is_on_path(module) else None


def _is_on_path(module: str) -> bool:
    """Return whether another process can import ``module``. False for a script run by ``runpy``."""
    package = module.partition(".")[0]
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _write_object(key: str, value: Any, folder: Path) -> str:
    """Pickle ``value`` in ``folder``. Returns the import path, ``FILE.py:NAME``."""
    stem = key.replace(".", "_")
    name = getattr(value, "__name__", "")
    name = name if name.isidentifier() else "value"
    # The pickle contains the code of a module that the run cannot import.
    module = sys.modules.get(getattr(value, "__module__", None) or "__main__")
    by_value = module is not None and not _is_on_path(module.__name__)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{key}: {value!r} cannot be pickled for the run's process: {type(error).__name__}: "
            f"{error}. Create files, connections and locks inside the function"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    # The pickle, and the module that loads it.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.pickle").write_bytes(pickled)
    source = textwrap.indent("\n".join(_sources(name, value)), "# ", lambda line: True)
    (folder / f"{stem}.py").write_text(
        f'"""Loads `{name}`, pickled for {key}. The source serves comparisons only."""\n'
        "import pickle\nfrom pathlib import Path\n\n"
        f'{name} = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())\n'
        f"try:\n    {name}.__module__ = __name__\nexcept AttributeError:\n    pass\n\n{source}\n"
    )
    return f"{folder / stem}.py:{name}"


def _sources(name: str, value: Any) -> Iterator[str]:
    """Yield the source of ``value`` and of each object it uses, or an importable object's path."""
    # Breadth first, so that the order does not depend on memory addresses.
    pending, visited = [(name, value)], set[int]()
    while pending:
        name, item = pending.pop(0)
        if id(item) in visited and not isinstance(item, _PLAIN):
            continue
        visited.add(id(item))
        # Values and importable objects need no source.
        if isinstance(item, _PLAIN):
            yield f"{name} = {_plain_text(item)}"
        elif item is not value and _importable_path(item):
            yield f"{name} = {_importable_path(item)}"
        # Parts of functions, methods, classes and other objects.
        elif isinstance(item, partial):
            pending += [(f"{name}.func", item.func), (f"{name}.args", item.args)]
            pending += [(f"{name}.keywords", item.keywords)]
        elif inspect.ismethod(item):
            pending += [(f"{name}.function", item.__func__), (f"{name}.self", item.__self__)]
        elif isinstance(item, FunctionType):
            yield f"{name} = {_function_source(item)}"
            pending += sorted(_references(item).items())
        elif isinstance(item, type):
            yield f"{name} = class {item.__qualname__}{item.__bases__}"
            members = sorted(vars(item).items())
            pending += [
                (f"{name}.{member}", getattr(part, "__func__", part))
                for member, part in members
                if member not in ("__dict__", "__weakref__", "__doc__", "__module__")
                and not member.startswith("__static")
            ]
        else:
            yield f"{name} = a {type(item).__qualname__}"
            if callable(item):
                state = sorted(getattr(item, "__dict__", {}).items())
                pending += [(f"{name}.type", type(item)), *state]


def _plain_text(value: Any) -> str:
    """Return ``value`` as JSON. JSON of over 1000 characters is replaced by its SHA-256 digest."""
    try:
        text = json.dumps(value, sort_keys=True, default=lambda item: type(item).__qualname__)
    except (TypeError, ValueError):  # keys of several types, or a circle
        return f"a {type(value).__qualname__}"
    return text if len(text) <= 1000 else hashlib.sha256(text.encode()).hexdigest()


def _function_source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        parts = [(code.co_code.hex(), code.co_consts, code.co_names) for code in _codes(function)]
        return _plain_text(parts)


def _codes(function: FunctionType) -> Iterator[CodeType]:
    pending = [function.__code__]
    for code in pending:
        yield code
        pending += [item for item in code.co_consts if isinstance(item, CodeType)]


def _references(function: FunctionType) -> dict[str, Any]:
    """Return the global variables, enclosing variables and defaults that a function uses."""
    names = {name for code in _codes(function) for name in code.co_names}
    outer = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            outer[name] = cell.cell_contents
    outer = {name: item for name, item in outer.items() if not inspect.ismodule(item)}
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return {**outer, **{name: item for name, item in defaults.items() if item is not None}}


def write_rows(key: str, rows: Any, folder: Path) -> tuple[str, set[str]]:
    """Write ``rows`` to ``folder`` as JSON lines. Return the file's path and the column names.

    ``rows``: a list, ``datasets.Dataset`` or generator of mappings from column to value, or a
    ``pandas.DataFrame``. ``key``: the configuration key, which gives the file's name. Raises
    `DataError` if there are no rows, or a row cannot be written as JSON.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        rows = rows.to_dict("records")
    folder.mkdir(parents=True, exist_ok=True)
    path, columns = folder / f"{key.replace('.', '_')}.jsonl", set[str]()
    index = -1
    with path.open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{key}: row {index} must be a mapping from column to value, got "
                    f"{type(row).__name__}"
                )
            columns |= row.keys()
            text = f"{key}: row {index} cannot be written as JSON"
            with raised_as(DataError, text, TypeError, ValueError):
                file.write(json.dumps(dict(row), ensure_ascii=False, default=_as_json) + "\n")
    if index < 0:
        raise DataError(f"{key}: the rows are empty. Give at least one row")
    return str(path), columns


def has_ground_truth(columns: set[str]) -> bool:
    """Return whether one of ``columns`` contains the ground truths."""
    from aligner.data.columns import NAMES  # imports torch

    others = {name.partition(".")[0] for name in NAMES["ground_truth_column"]}
    return "ground_truth" in columns or len(others & columns) == 1


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def is_rows(data: Any) -> bool:
    """Return whether ``data`` contains rows. False for paths and for a generator function."""
    if isinstance(data, str | os.PathLike) or callable(data):
        return False
    return not (isinstance(data, list | tuple) and data and isinstance(data[0], str | os.PathLike))
