"""Read rows, mappings from columns to values, from data files and Python generators."""

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aligner.errors import ConfigError, DataError, raised_as
from aligner.hub import hub_remedy
from aligner.importing import load_function
from aligner.packages import require_extra

V = TypeVar("V")
Source = str | Path | Sequence[str | Path]

# Keys of chat messages and tools, by which lists of them are recognised.
_CHAT_KEYS = frozenset({"role", "function", "parameters", "input_schema"})
_LARGEST = 3.4028234663852886e38  # float32's


class DataRow(NamedTuple):
    """One row of data."""

    location: str  # for errors, such as ``data/train.jsonl, line 12``
    columns: dict[str, Any]
    is_text: bool = False  # whether all values are text, as in CSV

    @property
    def remedy(self) -> str:
        """List of the columns' names, as the last sentence of an error message."""
        return f"Columns found: {sorted(self.columns)}"

    def get(self, name: str) -> Any:
        """Return the value of the column ``name``, or None if there is no such column.

        ``a.b`` is the key ``b`` in the value of column ``a``, unless there is a column ``a.b``.
        """
        if name in self.columns:
            return self.columns[name]
        value: Any = self.columns
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_rows(source: Source, arguments: Mapping[str, Any] | None = None) -> Iterator[DataRow]:
    """Yield the rows of ``source``, in order.

    Args:
        source: a ``.jsonl``, ``.json``, ``.csv``, ``.parquet``, ``.arrow`` or ``.txt`` file (each
            line a row with the column ``prompt``), a pattern of files, a directory of ``.jsonl`` or
            ``.parquet`` files or of ``datasets.save_to_disk``, a generator function
            (``package.module:function`` or ``path/to/file.py:function``), or a list of these.
            Files of a pattern or directory are read in the order of their names.
        arguments: keyword arguments for generator functions. Must be empty for files.

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
            f"data: the arguments {sorted(arguments)} are for a generator function, but {source} "
            "is a file. Remove the arguments"
        )
    for file in files:
        yield from map(_check_text, _READERS[file.suffix](file))


def own_tasks(count: int = 1024) -> Iterator[dict[str, Any]]:
    """Yield ``count`` rows without columns, for environments that contain their own tasks."""
    return ({} for _ in range(count))


def source_files(source: str | Path) -> list[Path] | None:
    """Return the data files that ``source`` selects, or None for a generator function.

    Raises `DataError` if there are no files, or a file has an unsupported format.
    """
    path, name = Path(source).expanduser(), str(source)
    if not path.exists() and ":" in name and not name.endswith(tuple(_READERS)):
        return None  # module:function
    # Find the files, and the error text for the case that there are none.
    files: list[Path] = []
    if not path.exists() and any(character in name for character in "*?["):
        matches = sorted(glob(str(path), recursive=True))
        files = [file for match in matches for file in source_files(match) or ()]
        problem = f"no file matches {name}. Correct the pattern{hub_remedy(name, 'dataset')}"
    elif path.is_dir() and (path / "dataset_dict.json").is_file():  # of datasets.save_to_disk
        splits = sorted(str(file.parent) for file in path.glob("*/state.json"))
        problem = f"{path} contains several splits. Give the path of one: {', '.join(splits)}"
    elif (path / "state.json").is_file():  # one split of datasets.save_to_disk
        damage = (ValueError, KeyError, TypeError)
        with raised_as(DataError, f"data: {path / 'state.json'} names no files", *damage):
            entries = json.loads((path / "state.json").read_text())["_data_files"]
            return [path / entry["filename"] for entry in entries]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        problem = f"directory {path} contains no .jsonl and no .parquet file"
    elif not path.is_file():
        problem = f"file {path} does not exist{hub_remedy(name, 'dataset')}"
    else:
        files = [path] if path.suffix in _READERS else []
        problem = (
            f"{path} has none of the suffixes {', '.join(_READERS)}. Convert the file, or give a "
            "generator function as package.module:function or path/to/file.py:function"
        )
    if not files:
        raise DataError(f"data: {problem}")
    return files


def _from_jsonl(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if line_number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            location = f"{path}, line {line_number}"
            yield _row(_parsed(line, location), location)


def _from_json(path: Path) -> Iterator[DataRow]:
    """Yield the objects of a JSON list, or of JSON Lines, which many .json files contain."""
    with path.open("rb") as file:
        is_list = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_list:
        yield from _from_jsonl(path)
        return
    values = _parsed(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path))
    for number, value in enumerate(values, start=1):
        yield _row(value, f"{path}, row {number}")


def _parsed(text: bytes, location: str) -> Any:
    with (
        raised_as(DataError, location, DataError),
        raised_as(DataError, "not JSON", ValueError),
        raised_as(DataError, "lists or objects are nested too deeply", RecursionError),
        raised_as(DataError, "not UTF-8", UnicodeDecodeError, remedy="save the file as UTF-8"),
    ):
        return json.loads(text, object_pairs_hook=_object)


def _row(value: Any, location: str) -> DataRow:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{location}: a row must be a JSON object with columns, got {kind}")
    return DataRow(location, value)


def _from_csv(path: Path) -> Iterator[DataRow]:
    """Yield a row for each line below the header. Values are text, or None for an empty cell."""
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of 128 KiB
    with (
        raised_as(DataError, f"{path}: not readable CSV", csv.Error, UnicodeDecodeError),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
        for cells in filter(None, lines):
            location = f"{path}, line {lines.line_num}"
            columns = {name: cell or None for name, cell in zip(header, cells, strict=False)}
            if not len(cells) == len(header) == len(columns):
                raise DataError(
                    f"{location}: {len(cells)} cells for the columns {header}. Give each column "
                    "a different name, and each line one cell per column"
                )
            yield DataRow(location, columns, is_text=True)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key {duplicate!r} occurs twice in one object. Keep one of them")
    return columns


def _check_text(row: DataRow) -> DataRow:
    """Return ``row``. Raises `DataError` for text with a lone surrogate, such as ``\\ud800``."""
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
                        f"{row.location}: column {name!r} contains half a character, the single "
                        f"surrogate \\u{ord(part[error.start]):x}. Write the complete character, "
                        "or remove it"
                    ) from error
    return row


def take(row: DataRow, name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """Return the value of the required column ``name``. ``key``: configuration key that sets it.

    Raises `DataError` if the value is missing or not of type ``kind``.
    """
    value = row.get(name)
    if isinstance(value, kind):
        return value
    state = "null" if name in row.columns else "missing"
    problem = f"is {state}. Name another column with {key}"
    if value is not None:
        names: dict[Any, str] = {str: "text", list: "a list of chat messages"}
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(names[kind] for kind in kinds)
        problem = f"must be {expected}, got {type(value).__name__}. Set another column with {key}"
    raise DataError(f"column {name!r} {problem}")


def converted(row: DataRow, name: str, convert: Callable[[Any], V | None], expected: str) -> V:
    """Return the result of ``convert`` for the value in column ``name``.

    Values of CSV files are first parsed as JSON. Raises `DataError` if ``convert`` returns None.
    ``expected``: text about the allowed values, for this error.
    """
    value = row.get(name)
    if row.is_text and isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value.lower())
    result = convert(value)
    if result is None:
        actual = "missing" if value is None else f"{value!r:.60} ({type(value).__name__})"
        raise DataError(
            f"{row.location}: column {name!r} must be {expected}, but it is {actual}. {row.remedy}"
        )
    return result


def finite_number(value: Any) -> float | None:
    """Return ``value`` as a float, or None if it is not a number in the range of float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # false for NaN


def _from_parquet(path: Path) -> Iterator[DataRow]:
    require_extra("parquet", str(path))
    import pyarrow
    from pyarrow import ipc, parquet

    number, is_stream = 0, path.suffix == ".arrow"
    try:
        with (
            ipc.open_stream(pyarrow.memory_map(str(path)))
            if is_stream
            else parquet.ParquetFile(path) as file
        ):
            for batch in file if is_stream else file.iter_batches():
                for columns in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield DataRow(f"{path}, row {number}", _without_arrow_nulls(columns))
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise DataError(
            f"{path}, after row {number}: cannot be read as {path.suffix}: {error}"
        ) from error


def _without_arrow_nulls(columns: Mapping[str, Any]) -> dict[str, Any]:
    # Arrow gives all entries of a list the same keys, with null where an entry had no such key.
    # Remove these keys from messages and tools.
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


_READERS = {
    ".jsonl": _from_jsonl,
    ".json": _from_json,
    ".csv": _from_csv,
    ".parquet": _from_parquet,
    ".arrow": _from_parquet,
    ".txt": _from_text,
}


def _from_function(name: str, arguments: Mapping[str, Any]) -> Iterator[DataRow]:
    function = load_function(name, key="data")
    text = f"data: {name} does not accept the arguments {dict(arguments)}"
    with raised_as(ConfigError, text, TypeError):
        rows = function(**arguments)
    if not isinstance(rows, Iterable):
        raise DataError(f"data: {name} must return or yield rows, got {type(rows).__name__}")
    # Errors of the user's function give the number of the last row.
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
