"""A gzip file inflated once for all processes of a machine that read it at the same time.

The file is in the temporary directory (``TMPDIR``), for its owner only. Readers hold a shared lock
on it; the first one inflates it under an exclusive one, and the one that closes it last removes it.
The file of a process that was killed stays until the next gzip archive is opened.
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
    """Open the content of the gzip file ``path``; inflated here unless another process has done so.

    Raises:
        CheckpointError: the file is damaged.
        StorageError: there is no room for it.
    """
    place = _place_of(path)
    _remove_left_over(beside=place)
    try:
        return io.BufferedReader(_Shared(place, path))
    except _NotOurs:  # another user's file of this name, or a file system without locks
        return _private(path)


class _NotOurs(Exception):
    """The shared file cannot be used."""


class _Shared(io.FileIO):
    """The shared file, open for reading; the process that closes it last removes it."""

    def __init__(self, place: str, packed: Path) -> None:
        self._place = place
        while True:
            try:
                number = os.open(place, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise _NotOurs from error
            super().__init__(number, "rb", closefd=True)
            try:
                found = os.fstat(number)
                if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                    raise _NotOurs
                if self._locked_and_whole(packed):
                    return
            except BaseException:
                super().close()
                raise
            super().close()  # removed in the meantime

    def _locked_and_whole(self, packed: Path) -> bool:
        """Wait for it or inflate it; False: it has been removed."""
        while True:
            # Readers keep their shared lock while they read: no process waits for an exclusive one.
            if self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                if not self._is_there():
                    return False
                if not self._is_whole():
                    self._inflate(packed)
            self._lock(fcntl.LOCK_SH)
            if not self._is_there():
                return False
            if self._is_whole():
                return True
            self._lock(fcntl.LOCK_UN)
            time.sleep(random.uniform(0.001, 0.01))  # who inflated it failed, or has yet to begin

    def _inflate(self, packed: Path) -> None:
        try:
            with open(self._place, "wb") as target:
                _inflate(packed, target)
            os.fchmod(self.fileno(), 0o400)  # the mark of a whole file
        except BaseException:
            os.unlink(self._place)
            raise

    def _is_whole(self) -> bool:
        return not os.fstat(self.fileno()).st_mode & stat.S_IWUSR

    def _is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._place), os.fstat(self.fileno()))
        return False

    def _lock(self, kind: int) -> bool:
        """False: another process holds a lock, and ``kind`` does not wait."""
        try:
            fcntl.flock(self.fileno(), kind)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _NotOurs from error
        return True

    def close(self) -> None:
        """Remove the file, unless another process reads it."""
        if not self.closed:
            _remove_if_unused(self.fileno(), self._place)
        super().close()


def _place_of(path: Path) -> str:
    """The same for every process of this user that opens this very file."""
    found = os.stat(path)
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    identity = (boot, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}-{os.geteuid()}-{digest}")


def _remove_if_unused(number: int, place: str) -> None:
    with contextlib.suppress(OSError):  # another process holds it, or has removed it
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(place), os.fstat(number)):
            os.unlink(place)


def _remove_left_over(beside: str) -> None:
    """Files of processes that were killed."""
    folder, name = os.path.split(beside)
    kin = f"{glob.escape(os.path.join(folder, name.rsplit('-', 1)[0]))}-*"
    for place in glob.iglob(kin):
        if place == beside:
            continue
        with contextlib.suppress(OSError), open(place, "rb") as stream:
            _remove_if_unused(stream.fileno(), place)


def _private(path: Path) -> IO[bytes]:
    """A file without a name, which vanishes with the process."""
    inflated = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        _inflate(path, inflated)
    except BaseException:
        inflated.close()
        raise
    inflated.seek(0)
    return inflated


def _inflate(path: Path, target: IO[bytes]) -> None:
    no_room = f"no room to inflate {str(path)!r} under {tempfile.gettempdir()!r}"
    text = f"{str(path)!r} is a truncated or damaged gzip archive"
    damage = (EOFError, gzip.BadGzipFile, zlib.error)
    with (
        raised_as(StorageError, no_room, OSError, remedy="free space or set TMPDIR"),
        raised_as(CheckpointError, text, *damage, remedy="copy it anew"),
    ):
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target, 1 << 20)
        target.flush()
