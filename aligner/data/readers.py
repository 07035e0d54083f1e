"""Reading of rows (column → value) from JSONL, Parquet and text files and Python generators."""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aligner.errors import ConfigError, DataError, raised_as
from aligner.importing import load_function
from aligner.packages import require_extra

V = TypeVar("V")
Source = str | Path | Sequence[str | Path]

# Keys that identify a list of structs as chat messages or tools.
_CHAT_KEYS = frozenset({"role", "function", "parameters", "input_schema"})
_LARGEST = 3.4028234663852886e38  # float32's


class DataRow(NamedTuple):
    """One row and its location, for example ``data/train.jsonl, line 12``."""

    location: str
    columns: dict[str, Any]


def read_rows(source: Source, arguments: Mapping[str, Any] | None = None) -> Iterator[DataRow]:
    """Yield the rows of ``source``, in order.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file, a directory of such files (read in the order of
            their names), a ``.txt`` file (each line a row with the column ``prompt``), a generator
            function (``package.module:function`` or ``path/to/file.py:function``), or a list of
            these, read in order.
        arguments: keyword arguments for generator functions. Refused for files.

    Raises:
        DataError: a file is missing, or a row cannot be read. The message names the file or row.
        ConfigError: a generator function cannot be imported.
    """
    if not isinstance(source, str | Path):
        for part in source:
            yield from read_rows(part, arguments)
        return
    files = source_files(source)
    if files is None:
        yield from map(_check_text, _from_function(str(source), arguments or {}))
        return
    if arguments:
        raise ConfigError(
            f"data: arguments {sorted(arguments)} are for generator functions, but {source} "
            "is a file. Remove the arguments"
        )
    for file in files:
        yield from map(_check_text, _READERS[file.suffix](file))


def source_files(source: str | Path) -> list[Path] | None:
    """Return the files of one source, or None for a generator function.

    Raises:
        DataError: the files are missing or have an unsupported format.
    """
    path, name = Path(source).expanduser(), str(source)
    if not path.exists() and ":" in name and not name.endswith(tuple(_READERS)):
        return None
    # A directory, or one file.
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not files:
            raise DataError(f"data: directory {path} contains no .jsonl and no .parquet file")
        return files
    if not path.is_file():
        raise DataError(f"data: file {path} does not exist")
    if path.suffix not in _READERS:
        raise DataError(
            f"data: {path} is neither .jsonl nor .parquet nor .txt. Give a generator function as "
            "package.module:function or path/to/file.py:function"
        )
    return [path]


def _from_jsonl(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if line_number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            location = f"{path}, line {line_number}"
            try:
                value = json.loads(line, object_pairs_hook=_object)
                if not isinstance(value, dict):
                    kind = type(value).__name__
                    raise DataError(f"a row must be a JSON object with columns, got {kind}")
            except (ValueError, RecursionError) as error:
                raise DataError(f"{location}: {_reason(error)}") from error
            yield DataRow(location, value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key {duplicate!r} occurs twice in one object. Keep one of them")
    return columns


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error}. Save the file as UTF-8"
    return f"not JSON: {error}"


def _check_text(row: DataRow) -> DataRow:
    """Raise `DataError` for text that is not encodable: a lone surrogate such as ``\\ud800``."""
    for name, column in row.columns.items():
        # Traverse nested values without recursion.
        parts: list[Any] = [name, column]
        while parts:
            part = parts.pop()
            if isinstance(part, Mapping):
                parts += [*part, *part.values()]
            elif isinstance(part, list | tuple):
                parts += part
            elif isinstance(part, str) and not part.isascii():
                try:
                    part.encode()
                except UnicodeEncodeError as error:
                    raise DataError(
                        f"{row.location}: column {name!r} contains half a character "
                        f"(\\u{ord(part[error.start]):x} without its other half). Write the "
                        "complete character, or remove it"
                    ) from error
    return row


def take(row: DataRow, name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """Return a required column of type ``kind``. ``key``: setting with its name, for errors."""
    value = row.columns.get(name)
    if value is None:
        raise DataError(
            f"column {name!r} is {'null' if name in row.columns else 'missing'}. Name another "
            f"column with {key}"
        )
    if not isinstance(value, kind):
        names: dict[Any, str] = {str: "text", list: "a list of chat messages"}
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(names[kind] for kind in kinds)
        raise DataError(f"column {name!r} must be {expected}, got {type(value).__name__}")
    return value


def converted(row: DataRow, name: str, convert: Callable[[Any], V | None], expected: str) -> V:
    """Convert a column. Raise `DataError` with ``expected`` if ``convert`` returns None."""
    value = row.columns.get(name)
    result = convert(value)
    if result is None:
        actual = "missing" if value is None else f"{value!r:.60} ({type(value).__name__})"
        raise DataError(
            f"{row.location}: column {name!r} must be {expected}, but it is {actual}. "
            f"Columns found: {sorted(row.columns)}"
        )
    return result


def finite_number(value: Any) -> float | None:
    """Return ``value`` as float if it is a number within float32's range, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # false for NaN


def _from_parquet(path: Path) -> Iterator[DataRow]:
    require_extra("parquet", str(path))
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield DataRow(f"{path}, row {number}", _without_arrow_nulls(columns))
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise DataError(f"{path}, after row {number}: not readable Parquet: {error}") from error


def _without_arrow_nulls(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the nulls that Arrow adds to chat messages and tools.

    The structs of an Arrow list share one set of keys, so that a tool call contains the arguments
    of all other tool calls as nulls. In lists of structs with one of the keys `_CHAT_KEYS`, and in
    structs with role and content, null keys are removed at every depth. Other values are unchanged.
    """
    return {name: _without_nulls(value, in_chat=False) for name, value in columns.items()}


def _without_nulls(value: Any, in_chat: bool) -> Any:
    if isinstance(value, Mapping):
        in_chat = in_chat or {"role", "content"} <= value.keys()
        parts = value.items()
        return {k: _without_nulls(v, in_chat) for k, v in parts if not (in_chat and v is None)}
    if not isinstance(value, list):
        return value
    structs = (item for item in value if isinstance(item, Mapping))
    in_chat = in_chat or any(_CHAT_KEYS & struct.keys() for struct in structs)
    return [_without_nulls(item, in_chat) for item in value]


def _from_text(path: Path) -> Iterator[DataRow]:
    with (
        raised_as(DataError, f"{path}: not UTF-8 text", UnicodeDecodeError),
        path.open(encoding="utf-8-sig") as lines,
    ):
        for line_number, line in enumerate(lines, start=1):
            if line.strip():
                yield DataRow(f"{path}, line {line_number}", {"prompt": line.rstrip("\r\n")})


_READERS = {".jsonl": _from_jsonl, ".parquet": _from_parquet, ".txt": _from_text}


def _from_function(name: str, arguments: Mapping[str, Any]) -> Iterator[DataRow]:
    function = load_function(name, key="data")
    text = f"data: {name} does not accept the arguments {dict(arguments)}"
    with raised_as(ConfigError, text, TypeError):
        rows = function(**arguments)
    if not isinstance(rows, Iterable):
        raise DataError(f"data: {name} must return or yield rows, got {type(rows).__name__}")
    # Errors of the user's function name the last row.
    number = 0
    is_arrow = type(rows).__module__.partition(".")[0] == "datasets"
    try:
        for number, columns in enumerate(rows, start=1):
            if not isinstance(columns, Mapping):
                raise DataError(
                    f"{name}, row {number}: a row must be a dict of columns, got "
                    f"{type(columns).__name__}"
                )
            plain = _without_arrow_nulls(columns) if is_arrow else dict(columns)
            yield DataRow(f"{name}, row {number}", plain)
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise DataError(
            f"{name}, after row {number}: raised {type(error).__name__}: {error}"
        ) from error
