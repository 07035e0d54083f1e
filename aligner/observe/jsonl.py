"""Files of JSON lines that stay readable if the process is killed while it writes."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from aligner.checkpoint.durable import atomic_file, storage_error, storing, unused_path
from aligner.plain import plain

logger = logging.getLogger(__name__)


class JsonLines:
    """File with one JSON object per line. Its integer key ``step`` never decreases.

    `append` returns after the lines are on the disk. If a process is killed while it writes, the
    last line may be damaged and has no newline. Readers skip damaged lines, and `truncate_after`
    removes them. If another line than the last is damaged, `truncate_after` first copies the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        lines = [line for _, line in _records(path)]
        steps = [line.step for line in lines if line.step is not None]
        self._end = lines[-1].end if lines else 0
        self.last_step = steps[-1] if steps else None

    def _open(self) -> None:
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # No O_APPEND: a failed write is undone by truncating, and the next write starts there.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record, or none of them if this raises `StorageError`."""
        records = list(records)
        if not records:
            return
        steps = [record["step"] for record in records]
        last = steps[0] if self.last_step is None else self.last_step
        if [last, *steps] != sorted([last, *steps]):
            raise ValueError(
                f"{self.path} ends at step {last}, so lines of steps {steps} cannot be appended: "
                f"steps must not decrease. Call truncate_after({min(steps) - 1}) first"
            )
        content = "".join(dump_line(record) + "\n" for record in records).encode()
        try:
            os.ftruncate(self._file, self._end)  # removes an incomplete last line
            written = 0
            while written < len(content):
                written += os.pwrite(self._file, content[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise storage_error(self.path, error, len(content)) from error
        self._end, self.last_step = self._end + len(content), steps[-1]

    def truncate_after(self, step: int) -> None:
        """Remove damaged lines and the lines of later steps than ``step``."""
        lines = [line for _, line in _records(self.path)]
        remaining = [line for line in lines if line.step is not None and line.step <= step]
        if remaining == lines[: len(remaining)]:
            self._end = remaining[-1].end if remaining else 0
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
        else:
            self._rewrite(remaining)
        self.last_step = remaining[-1].step if remaining else None

    def _rewrite(self, remaining: Sequence["_Line"]) -> None:
        copy = unused_path(self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}"))
        logger.warning(
            "%s contains lines that are unreadable or out of order. The other lines are kept. The "
            "unchanged file is %s",
            self.path,
            copy,
        )
        content = self.path.read_bytes()
        with storing(copy), atomic_file(self.path) as file:
            shutil.copy2(self.path, copy)
            for line in remaining:
                file.write(content[line.start : line.end])
        os.close(self._file)
        self._open()
        self._end = sum(line.end - line.start for line in remaining)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def dump_line(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of JSON, with NaN and infinity as strings."""
    return json.dumps(plain(record), allow_nan=False)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each undamaged line. A missing file counts as empty."""
    if path.exists():
        yield from (record for record, _ in _records(path) if record is not None)


class _Line(NamedTuple):
    start: int  # index of the line's first byte
    end: int
    step: int | None  # None for a damaged line


def _records(path: Path) -> Iterator[tuple[dict[str, Any] | None, _Line]]:
    """Yield (object, byte range) of each line with a newline. The object is None if damaged."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            start, end = end, end + len(line)
            record: Any = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                record = None
            yield record, _Line(start, end, None if record is None else record["step"])
