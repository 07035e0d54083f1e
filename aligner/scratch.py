"""Temporary folders that are removed even if their process is killed.

A process locks its folders, and the kernel releases the locks when the process ends. A folder of
this user without a lock therefore belongs to a dead process, and `remove_leftovers` removes it.
"""

import fcntl
import os
import subprocess
import tempfile
from contextlib import suppress
from functools import cache

_PREFIX, _NEW = "aligner-scratch-", "new-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# `rm` handles any depth of folders. `chmod` opens folders that their owner cannot enter.
_REMOVE = 'exec <&- >&- 2>&-; rm -rf -- "$0" || { chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }'
_PATIENCE_S = 1.0  # seconds to wait for the removal, which then continues in the background
_removals: list["subprocess.Popen[bytes]"] = []


class ScratchFolder:
    """A new temporary folder, which `close` removes."""

    def __init__(self) -> None:
        _remove_leftovers_once(tempfile.gettempdir())
        new_path = tempfile.mkdtemp(prefix=_NEW + _PREFIX)
        self._lock = os.open(new_path, _FOLDER)
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new_path.replace(_NEW + _PREFIX, _PREFIX)
        os.rename(new_path, self.path)  # visible to `remove_leftovers` only after it is locked

    def close(self) -> None:
        """Remove the folder and its content. Call this only once."""
        os.close(self._lock)
        _remove(self.path)


def remove_leftovers(folder: str) -> None:
    """Remove this user's scratch folders in ``folder`` that no process has locked."""
    with suppress(OSError):
        for name in [name for name in os.listdir(folder) if name.startswith(_PREFIX)]:
            with suppress(OSError):  # a process has locked it
                lock = os.open(os.path.join(folder, name), _FOLDER)
                try:
                    if os.fstat(lock).st_uid == os.getuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove(os.path.join(folder, name))
                finally:
                    os.close(lock)


_remove_leftovers_once = cache(remove_leftovers)


def _remove(path: str) -> None:
    _removals[:] = [removal for removal in _removals if removal.poll() is None]
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["sh", "-c", _REMOVE, path]
        _removals.append(subprocess.Popen(command, start_new_session=True))
        _removals[-1].wait(_PATIENCE_S)
