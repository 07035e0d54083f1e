"""Durable writing: files are on the disk when a call returns. Errors give the free space."""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aligner.checkpoint.background import AbandonedError
from aligner.errors import StorageError

_BLOCK = 1 << 24  # bytes per write
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def readable_bytes(count: float) -> str:
    """Format bytes with a unit: ``1_600_000_000`` as ``1.49 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def free_bytes(path: Path) -> int:
    """Return the bytes that a user without privileges can still write on the disk of ``path``."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def storage_error(
    path: Path, cause: OSError, size: int | None = None, note: str = ""
) -> StorageError:
    """Return the error of a failed write to ``path``, with a remedy and the ``errno`` of ``cause``.

    ``size``: number of bytes that the file needs. ``note``: text at the end of the message.
    """
    text = str(cause)
    if not isinstance(cause, StorageError):
        remedy = "Make the directory writable, or choose another directory"
        if cause.errno in _FULL:
            required = "" if size is None else f"{readable_bytes(size)} ({size} bytes) needed, "
            free = free_bytes(path)
            remedy = (
                f"{required}{readable_bytes(free)} ({free} bytes) free. Free some space, raise the "
                "quota, or choose another directory"
            )
        reason = f"{cause.strerror or cause}. {remedy}"
        text = f"cannot write {path}: {reason} (exp_manager.explicit_log_dir)"
    error = StorageError(text + note)
    error.errno = cause.errno
    return error


@contextlib.contextmanager
def storing(path: Path, size: int | None = None, note: str = "") -> Iterator[None]:
    """Raise an `OSError` of the ``with`` block as `storage_error`, which has the same arguments."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, size, note) from error


def require_free_space(folder: Path, size: int) -> None:
    """Raise `StorageError` if the disk of ``folder`` has fewer than ``size`` bytes free."""
    if free_bytes(folder) < size:
        raise storage_error(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), size)


class _File(io.FileIO):
    """Unbuffered file for `durable_file`.

    ``error`` is the cause of a failed write, because serialisers written in C++ do not report it.
    ``checksum`` is the CRC-32 of all bytes, or None if they were not written sequentially.
    """

    def __init__(self, path: Path, stop: threading.Event | None = None) -> None:
        super().__init__(path, "wb")
        self._path, self._stop = path, stop
        self.error: OSError | None = None
        self.checksum: int | None = 0

    def write(self, data: Any) -> int:
        """Write all of ``data``, or raise `AbandonedError` once ``stop`` is set."""
        view = memoryview(data).cast("B")
        total = 0
        while total < len(view):
            if self._stop is not None and self._stop.is_set():
                raise AbandonedError(f"writing {self._path} was cancelled")
            # Write one block and compute its checksum while it is in the processor's cache.
            block = view[total : total + _BLOCK]
            written = 0
            try:
                while written < len(block):
                    written += super().write(block[written:]) or 0
            except OSError as error:
                self.error = error
                raise
            if self.checksum is not None:
                self.checksum = zlib.crc32(block, self.checksum)
            total += len(block)
        return total

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to ``offset``. ``checksum`` becomes None."""
        self.checksum = None
        return super().seek(offset, whence)


@contextlib.contextmanager
def durable_file(
    path: Path, size: int | None = None, stop: threading.Event | None = None
) -> Iterator[Any]:
    """Yield ``path``, open for writing bytes, and flush the file to the disk after the block.

    ``size``: expected bytes of the file, for errors. ``stop``: once this event is set, writing
    raises `AbandonedError`. Raises `StorageError` for a failed write.
    """
    file: _File | None = None
    try:
        with _File(path, stop) as file:
            yield file
            os.fsync(file.fileno())
    except Exception as error:
        cause = error if isinstance(error, OSError) else file.error if file else None
        if cause is None or isinstance(cause, StorageError):
            raise
        raise storage_error(path, cause, size) from error


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], size: int | None = None) -> Iterator[Any]:
    """Yield a `durable_file` with a temporary name, and rename it to ``path`` after the block."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with storing(target, size):
            target.parent.mkdir(parents=True, exist_ok=True)
            with durable_file(partial, size) as file:
                yield file
            # The rename and the entry of the directory make the file visible.
            os.replace(partial, target)
            sync_path(target.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, which keeps floats exact, and flush it to the disk."""
    with durable_file(path) as file:
        file.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def unused_path(path: Path) -> Path:
    """Return the first of ``path``, ``stem_2.suffix``, ``stem_3.suffix``, … that does not exist."""
    names = (path.stem if n == 1 else f"{path.stem}_{n}" for n in itertools.count(1))
    paths = (path.with_name(f"{name}{path.suffix}") for name in names)
    return next(candidate for candidate in paths if not candidate.exists())


def sync_path(path: Path) -> None:
    """Flush a file's contents, or a directory's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a directory and everything below it."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
