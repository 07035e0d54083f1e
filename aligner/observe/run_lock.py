"""One writer per run directory: the same command started twice must not mix two runs."""

import errno
import fcntl
import os
import time
from pathlib import Path

from aligner.checkpoint.durable import storage_error
from aligner.errors import StorageError

_BUSY = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Holds ``<folder>/.lock`` until it is released or the process ends, however it ends.

    A record lock: children made by fork do not inherit it, so a worker that outlives a killed run
    does not keep the next one out. Where the file system has no locks, there is none.

    Args:
        folder: directory of the run.
        patience: seconds to wait for a process that is just ending.
    """

    def __init__(self, folder: Path, *, patience: float = 5.0) -> None:
        path = folder / ".lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(path, error) from error
        deadline = time.monotonic() + patience
        while not self._acquired():
            if time.monotonic() >= deadline:
                holder = os.pread(self._file, 20, 0).decode(errors="replace").strip()
                self.release()
                raise StorageError(
                    f"{folder} is being written by another process (pid {holder or 'unknown'}); "
                    "wait until that run ends, or set exp_manager.explicit_log_dir to another"
                )
            time.sleep(0.05)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _acquired(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _BUSY
        return True
