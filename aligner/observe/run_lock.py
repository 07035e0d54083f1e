"""A lock on the run directory, so that two processes never write to the same directory."""

import errno
import fcntl
import os
import time
from pathlib import Path

from aligner.checkpoint.durable import storing
from aligner.errors import StorageError

LOCK_FILE, RUN_FILE = ".lock", "run.json"
_BUSY = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Lock on the file ``<folder>/.lock``, until `release` or until the process ends.

    Forked children do not inherit the lock (POSIX record lock), so that a worker that survives its
    killed run does not block the next run. On a file system without locks, it has no effect. Waits
    up to ``patience`` seconds for the lock, then raises `StorageError`.
    """

    def __init__(self, folder: Path, *, patience: float = 5.0) -> None:
        self._path = folder / LOCK_FILE
        self._file = self._open()
        deadline = time.monotonic() + patience
        while not self._acquired():
            if time.monotonic() >= deadline:
                owner = os.pread(self._file, 20, 0).decode(errors="replace").strip()
                self.release()
                raise StorageError(
                    f"{folder} is being written by another process (pid {owner or 'unknown'}). "
                    "Wait until that process ends, or set exp_manager.explicit_log_dir to another "
                    "folder"
                )
            time.sleep(0.05)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        with storing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)

    def _acquired(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _BUSY
        # Another run may have removed the file since it was opened here. Then open it again.
        if os.fstat(self._file).st_nlink:
            return True
        self.release()
        self._file = self._open()
        return False
