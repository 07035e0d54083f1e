"""An append-only file of JSON lines that survives being killed and can go back to a step."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from aligner.checkpoint.durable import atomic_file, storage_error, unused_path
from aligner.plain import plain

logger = logging.getLogger(__name__)


class JsonLines:
    """Lines that each hold an object with an integer ``step``, in ascending order of steps.

    Every `append` is on the disk when it returns. A line that was being written when the process
    died ends without a newline; it is ignored by readers and removed by `truncate_after`. Any other
    line that cannot be read costs only itself: readers pass over it, and the file as it was is
    kept beside the one that goes on without it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        lines = _lines(path)
        steps = [line.step for line in lines if line.step is not None]
        self._end = lines[-1].end if lines else 0
        self.last_step = steps[-1] if steps else None

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # No O_APPEND: a failed write is taken back by truncating, and the next one goes there.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records; all of them or, if the disk refuses, none (``StorageError``)."""
        records = list(records)
        if not records:
            return
        steps = [record["step"] for record in records]
        last = steps[0] if self.last_step is None else self.last_step
        if [last, *steps] != sorted([last, *steps]):
            raise ValueError(
                f"{self.path} ends at step {last}, and lines of steps {steps} were given; steps "
                f"must not go back: call truncate_after({min(steps) - 1}) first"
            )
        text = "".join(dump_line(record) + "\n" for record in records).encode()
        try:
            os.ftruncate(self._file, self._end)  # removes a torn line
            written = 0
            while written < len(text):
                written += os.pwrite(self._file, text[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise storage_error(self.path, error, len(text)) from error
        self._end, self.last_step = self._end + len(text), steps[-1]

    def truncate_after(self, step: int) -> int | None:
        """Remove every line of a later step and a torn last line; return the last step left."""
        lines = _lines(self.path)
        kept = [line for line in lines if line.step is not None and line.step <= step]
        if kept == lines[: len(kept)]:
            self._end = kept[-1].end if kept else 0
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
        else:
            self._rewrite(kept)
        self.last_step = kept[-1].step if kept else None
        return self.last_step

    def _rewrite(self, kept: Sequence["_Line"]) -> None:
        """Go on with ``kept``, which are not the beginning of the file, and keep the file aside."""
        aside = unused_path(self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}"))
        logger.warning(
            "%s holds lines that cannot be read or stand out of order; the others are kept, and "
            "the file as it was is %s",
            self.path,
            aside,
        )
        content = self.path.read_bytes()
        try:
            shutil.copy2(self.path, aside)
            with atomic_file(self.path) as file:
                for line in kept:
                    file.write(content[line.start : line.end])
        except OSError as error:
            raise storage_error(aside, error) from error
        os.close(self._file)
        self._open()
        self._end = sum(line.end - line.start for line in kept)

    def close(self) -> None:
        """Release the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def dump_line(record: Mapping[str, Any]) -> str:
    """One line of standard JSON; a float has the shortest text that reads back as the same bits.

    JSON has no NaN and infinities: they become the strings that Python and pandas parse as such,
    and other values what `aligner.plain` makes of them, at every depth.
    """
    return json.dumps(plain(record), allow_nan=False)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file as they stand; none where it is missing.

    A torn last line and lines that cannot be read are left out.
    """
    if path.exists():
        yield from (record for record, _ in _records(path) if record is not None)


class _Line(NamedTuple):
    """Position of a complete line, and its step; None where the step cannot be read."""

    start: int
    end: int
    step: int | None


def _lines(path: Path) -> list[_Line]:
    return [line for _, line in _records(path)]


def _records(path: Path) -> Iterator[tuple[dict[str, Any] | None, _Line]]:
    """Every line that ends with a newline: its record, if it can be read, and its place."""
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
