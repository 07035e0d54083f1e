"""Ending a process with everything it started, sessions of their own included.

This module imports neither torch nor numpy: it is loaded by every reward process.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_S = 2.0  # spent on descendants that do not end


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found.

    Linux only; elsewhere those that left their parent's session are not found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(pid: int) -> None:
    """Kill process ``pid``, its process group and all its descendants.

    ``pid`` may be this process, which then ends with them. One that is already gone is no error;
    of that, descendants in sessions of their own are no longer found.
    """
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        if pid != os.getpid():
            top.suspend()  # it starts nothing more, and adopts its children's orphans
        deadline = time.monotonic() + _LONGEST_S
        while (alive := _living(top)) and time.monotonic() < deadline:
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _living(top: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in top.children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
