"""Temporary folders that are removed with the process that uses them, however that ends.

The maker of a folder holds a lock on it, which the kernel releases when the maker ends. A folder of
this user's without a holder is therefore left over, and `remove_leftovers` removes it.
"""

import fcntl
import os
import subprocess
import tempfile
from contextlib import suppress
from functools import cache

_PREFIX, _NEW = "aligner-scratch-", "new-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# `rm` does not recurse, so folders may be nested in any depth; some may be closed to their owner.
_REMOVE = 'exec <&- >&- 2>&-; rm -rf -- "$0" || { chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }'
_PATIENCE_S = 1.0  # spent on waiting for the removal, which then goes on by itself
_removals: list["subprocess.Popen[bytes]"] = []


class ScratchFolder:
    """An empty folder of this process, below the temporary directory, until it is closed."""

    def __init__(self) -> None:
        """Make it; the first time, folders that dead processes left beside it are removed."""
        _remove_leftovers_once(tempfile.gettempdir())
        made = tempfile.mkdtemp(prefix=_NEW + _PREFIX)
        self._lock = os.open(made, _FOLDER)
        with suppress(OSError):  # a file system without locks: nobody takes it for left over
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.replace(_NEW + _PREFIX, _PREFIX)
        os.rename(made, self.path)  # from now on others look at it, and it is locked

    def close(self) -> None:
        """Remove the folder and what is in it. May be called once."""
        os.close(self._lock)
        _remove(self.path)


def remove_leftovers(folder: str) -> None:
    """Remove this user's scratch folders in ``folder`` that no living process holds."""
    with suppress(OSError):
        for name in [name for name in os.listdir(folder) if name.startswith(_PREFIX)]:
            with suppress(OSError):  # somebody holds it
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
