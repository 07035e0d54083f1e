"""Writes functions, classes and rows to files, whose paths are values of configuration keys.

An importable function or class becomes its path, ``package.module:name``. Any other object, such as
a function of a notebook, becomes a pickle and a module that loads the pickle. The module contains
the source as a comment. A run that is continued compares the module, and so notices changed code.
"""

import copyreg
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import os
import sys
import sysconfig
import textwrap
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType, MappingProxyType
from typing import Any, ClassVar

import cloudpickle

from aligner.errors import ConfigError, DataError, raised_as

_NO_SOURCE = ("__dict__", "__weakref__", "__doc__", "__module__")  # members of classes


def _with_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


def _reduced_cache(cached: Any) -> Any:
    """Return the name of a function with `lru_cache`, or the parts that create the function."""
    if _importable_path(cached):
        return cached.__qualname__
    return _with_cache, (cached.__wrapped__, cached.cache_parameters())


_CACHED = type(lru_cache(_with_cache))


class _Pickler(cloudpickle.Pickler):
    """Pickles functions with `lru_cache`, and `dataclasses.MISSING` as the same object."""

    _reductions: ClassVar = {
        type(dataclasses.MISSING): lambda _: "MISSING",
        _CACHED: _reduced_cache,
    }
    dispatch_table: ClassVar = ChainMap(_reductions, cloudpickle.Pickler.dispatch_table)


def as_setting(key: str, value: Any, folder: Path) -> Any:
    """Return ``value`` with import paths in place of functions and classes.

    ``key``: configuration key of the value. Objects that no path imports are pickled to
    ``folder``. Raises `ConfigError` if pickling fails.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value):
        return _importable_path(value) or _write_object(key, value, folder)
    if isinstance(value, Mapping):
        return {name: as_setting(f"{key}.{name}", item, folder) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_setting(f"{key}.{i}", item, folder) for i, item in enumerate(value)]
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
        _Pickler(pickled := io.BytesIO()).dump(value)
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
    (folder / f"{stem}.pickle").write_bytes(pickled.getvalue())
    source = textwrap.indent("\n".join(_sources(name, value)), "# ", lambda line: True)
    (folder / f"{stem}.py").write_text(
        f'"""Loads `{name}`, pickled for {key}. The source serves comparisons only."""\n'
        "import pickle\nfrom pathlib import Path\n\n"
        f'{name} = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())\n'
        f"try:\n    {name}.__module__ = __name__\nexcept AttributeError:\n    pass\n\n{source}\n"
    )
    return f"{folder / stem}.py:{name}"


def _sources(name: str, value: Any) -> Iterator[str]:
    """Yield the source of ``value``, and sources and values of the objects that it uses."""
    # Breadth first, so that the order does not depend on memory addresses.
    pending = deque([(name, value)])
    visited = dict[int, Any]()  # by id, which a living object keeps
    while pending:
        name, item = pending.popleft()
        text = _plain_text(item)
        if text is not None:
            yield f"{name} = {text}"
        if text is not None or id(item) in visited:
            continue
        visited[id(item)] = item
        if inspect.ismodule(item):
            if digest := _digest_of_module(item):
                yield f"{name} = module{digest}"
        elif item is not value and _importable_path(item):
            yield f"{name} = {_importable_path(item)}{_digest_of_module(item)}"
        elif isinstance(item, FunctionType):
            yield f"{name} = {_function_source(item)}"
            pending += sorted(_references(item).items())
        else:
            if isinstance(item, type):
                yield f"{name} = class {item.__qualname__}{item.__bases__}"
            elif not (isinstance(item, partial) or inspect.ismethod(item)):
                yield f"{name} = a {_kind(item)}"
            pending += [(f"{name}.{key}", part) for key, part in _parts(item)]


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each part of an object that is not a function, in a fixed order."""
    if type(item) in (dict, MappingProxyType):
        named = ((_plain_text(key) or _kind(key), part) for key, part in item.items())
        yield from sorted(named, key=itemgetter(0))
    elif type(item) in (list, tuple, set, frozenset):
        members = sorted(item, key=repr) if isinstance(item, set | frozenset) else item
        yield from ((str(index), part) for index, part in enumerate(members))
    elif isinstance(item, partial):
        yield from (("func", item.func), ("args", item.args), ("keywords", item.keywords))
    elif inspect.ismethod(item):
        yield from (("function", item.__func__), ("self", item.__self__))
    elif isinstance(item, _CACHED):
        yield "function", item.__wrapped__
    elif isinstance(item, property):
        yield from (("get", item.fget), ("set", item.fset))
    elif isinstance(item, type):
        yield from (("base", base) for base in item.__bases__ if base is not object)
        for member, part in sorted(vars(item).items()):
            if member not in _NO_SOURCE and not member.startswith("__static"):
                yield member, getattr(part, "__func__", part)
    elif hasattr(item, "detach"):  # a tensor, whose pickle contains addresses
        flat = item.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8)
        yield "value", (str(item.dtype), *item.shape, flat.numpy().tobytes())
    else:
        # The type, and the state that a pickle contains.
        yield "type", type(item)
        if _kind(item) in ("Random", "Generator", "RandomState"):
            return  # the state differs between processes
        if isinstance(item, set | frozenset):  # a subclass, whose members have no fixed order
            yield from (("members", {*item}), ("attributes", getattr(item, "__dict__", {})))
            return
        with suppress(Exception):  # descriptors of a class have none
            reduce = copyreg.dispatch_table.get(type(item))
            reduced = item.__reduce_ex__(4) if reduce is None else reduce(item)
            state = (reduced,) if isinstance(reduced, str) else reduced[1:3]
            items = () if isinstance(reduced, str) else map(list, filter(None, reduced[3:5]))
            yield from ((f"state{index}", part) for index, part in enumerate((*state, *items)))


def _kind(item: Any) -> str:
    return type(item).__qualname__


def _digest_of_module(item: Any) -> str:
    """Return a digest of the file that defines ``item``, or '' for an installed package."""
    module = item if inspect.ismodule(item) else sys.modules.get(item.__module__)
    path = getattr(module, "__file__", None) or ""
    installed = [*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
    library = str(Path(__file__).parents[1])
    if not os.path.isfile(path) or any(Path(path).is_relative_to(f) for f in (*installed, library)):
        return ""
    return f" sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def _plain_text(value: Any) -> str | None:
    """Return numbers, text, bytes and containers of them as JSON or its digest, else None."""
    try:
        if not _is_plain(value):
            return None
        text = json.dumps(value, sort_keys=True, default=_as_text)
    except (TypeError, ValueError, RecursionError):  # also keys of several types, or a circle
        return None
    return text if len(text) <= 1000 else hashlib.sha256(text.encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    """Return whether no object in ``value`` has a class with methods of its own."""
    if type(value) in (list, tuple, set, frozenset, dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(_is_plain, parts))
    return type(value).__module__ == "builtins"


def _as_text(item: Any) -> Any:
    if isinstance(item, set | frozenset):
        return sorted(json.dumps(member, default=_as_text) for member in item)
    if isinstance(item, CodeType):
        return "code"  # with `_codes`
    if isinstance(item, bytes | bytearray | complex | EllipsisType):
        return repr(item)
    raise TypeError(_kind(item))


def _function_source(function: FunctionType) -> str | None:
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
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return {**outer, **{name: item for name, item in defaults.items() if item is not None}}


def write_rows(key: str, rows: Any, folder: Path) -> tuple[str, set[str]]:
    """Write ``rows`` to ``folder`` as JSON lines. Return the file's path and the column names.

    ``rows``: a list, ``datasets.Dataset`` or generator of mappings from column to value, or a
    ``pandas.DataFrame``. ``key``: the configuration key, which gives the file's name. Raises
    `ConfigError` if ``rows`` has another type, and `DataError` if there are no rows, or a row
    cannot be written as JSON.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        rows = rows.to_dict("records")
    folder.mkdir(parents=True, exist_ok=True)
    path, columns = folder / f"{key.replace('.', '_')}.jsonl", set[str]()
    with raised_as(ConfigError, f"{key}={rows!r} is no path and has no rows", TypeError):
        rows = iter(rows)
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
