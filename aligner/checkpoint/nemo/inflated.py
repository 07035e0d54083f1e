"""Gzip files that all processes of a machine read from one decompressed (inflated) file.

The inflated file is in ``TMPDIR``. The first reader writes it under an exclusive lock, then sets
its mode to 0400. Each reader keeps a shared lock. The last reader removes the file. If all readers
are killed, the file remains until the next gzip archive is opened.

::

    open ── lock exclusively ── not inflated: inflate, set mode 0400
      │        └ failed: another process inflates or reads
      └──── lock shared ── inflated: read ── close ── lock exclusively: remove
               └ removed or not inflated: again
"""

import contextlib
import fcntl
import glob
import gzip
import hashlib
import io
import os
import random
import shutil
import stat
import tempfile
import time
import zlib
from pathlib import Path
from typing import IO

from aligner.errors import CheckpointError, StorageError, raised_as

_PREFIX = "aligner-inflated"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def open_inflated(path: Path) -> IO[bytes]:
    """Decompress the gzip file ``path`` to ``TMPDIR``, and open the result for reading.

    Raises `CheckpointError` for a damaged file, `StorageError` if ``TMPDIR`` has too little space.
    """
    shared = _shared_path(path)
    # Remove the files of killed processes.
    for leftover in glob.iglob(f"{glob.escape(shared.rpartition('-')[0])}-*"):
        if leftover != shared:
            with contextlib.suppress(OSError), open(leftover, "rb") as stream:
                _remove_if_unused(stream.fileno(), leftover)
    try:
        return io.BufferedReader(_Shared(shared, path))
    except StorageError:
        raise
    except OSError:
        # The shared file belongs to another user, or its file system has no locks. Use a file
        # without a name, which the system removes when the process ends.
        private = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            _inflate(path, private)
        except BaseException:
            private.close()
            raise
        private.seek(0)
        return private


def _shared_path(path: Path) -> str:
    """Return the path of the inflated file, equal for all processes of this user."""
    status = os.stat(path)
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    identity = (boot, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}-{os.geteuid()}-{digest}")


class _Shared(io.FileIO):
    """Inflated file, open for reading. `close` removes the file if no other process reads it.

    Raises `OSError` if the file belongs to another user, or its file system has no locks.
    """

    def __init__(self, path: str, packed: Path) -> None:
        self._path = path
        while not self._open(packed):
            # The file was removed by its last reader, or is not inflated yet, or inflating failed.
            time.sleep(random.uniform(0.001, 0.01))
        super().__init__(self._descriptor, "rb")

    def _open(self, packed: Path) -> bool:
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        is_ready = False
        try:
            status = os.fstat(self._descriptor)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                raise PermissionError(self._path)
            # No process waits for an exclusive lock, because readers keep their shared locks.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._exists() and not self._is_complete():
                    self._inflate(packed)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            is_ready = self._exists() and self._is_complete()
        finally:
            if not is_ready:
                os.close(self._descriptor)
        return is_ready

    def _inflate(self, packed: Path) -> None:
        try:
            with open(self._path, "wb") as target:
                _inflate(packed, target)
            os.fchmod(self._descriptor, 0o400)  # marks a complete file
        except BaseException:
            os.unlink(self._path)
            raise

    def _is_complete(self) -> bool:
        return not os.fstat(self._descriptor).st_mode & stat.S_IWUSR

    def _exists(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        """Close the file, and remove it unless another process reads it."""
        if not self.closed:
            _remove_if_unused(self.fileno(), self._path)
        super().close()


def _remove_if_unused(descriptor: int, path: str) -> None:
    with contextlib.suppress(OSError):  # another process has a lock, or has removed the file
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.unlink(path)


def _inflate(path: Path, target: IO[bytes]) -> None:
    no_space = f"no space to inflate {str(path)!r} under {tempfile.gettempdir()!r}"
    text = f"{str(path)!r} is a truncated or damaged gzip archive"
    damage = (EOFError, gzip.BadGzipFile, zlib.error)
    with (
        raised_as(StorageError, no_space, OSError, remedy="free space or set TMPDIR"),
        raised_as(CheckpointError, text, *damage, remedy="copy it again"),
    ):
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target, 1 << 20)
        target.flush()
