"""An append-only file of JSON lines that survives being killed and can go back to a step."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.checkpoint.durable import storage_error


class JsonLines:
    """Lines that each hold an object with an integer ``step``, in ascending order of steps.

    Every `append` is on the disk when it returns. A line that was being written when the process
    died ends without a newline; it is ignored by readers and removed by `truncate_after`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # No O_APPEND: a failed write is taken back by truncating, and the next one goes there.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(path, error) from error
        self._end, self.last_step = _end_of_steps(path, math.inf)

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
        self._end, self.last_step = _end_of_steps(self.path, step)
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)
        return self.last_step

    def close(self) -> None:
        """Release the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def dump_line(record: Mapping[str, Any]) -> str:
    """One line of standard JSON; a float has the shortest text that reads back as the same bits.

    JSON has no NaN and infinities: they become the strings that Python and pandas parse as such.
    """
    return json.dumps({key: _standard(value) for key, value in record.items()}, allow_nan=False)


def _standard(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file as they stand, a torn last line left out; none where it is missing."""
    if path.exists():
        yield from (record for record, _ in _complete_lines(path))


def _complete_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each readable record with the file offset after it; stops at the first that is not."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                return
            offset += len(line)
            yield record, offset


def _end_of_steps(path: Path, last: float) -> tuple[int, int | None]:
    """File offset after the lines of steps up to ``last``, and the last such step."""
    end, step = 0, None
    for record, offset in _complete_lines(path):
        if record["step"] > last:
            break
        end, step = offset, record["step"]
    return end, step
