"""Kill a process with all its descendants, also if its parent has died.

This module imports neither torch nor numpy, because every process of user code imports it.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import psutil

from aligner.scratch import remove_leftovers

# Environment variable that identifies the descendants of a child process if the child is dead.
MARK = "ALIGNER_CHILD_PROCESS"
LONGEST_KILL_S = 2.0  # maximum seconds to wait for the death of descendants
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """On Linux, become the parent of descendants whose parent dies, so that they can be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(pid: int) -> None:
    """Kill process ``pid``, its process group and its descendants. Remove their scratch folders.

    If ``pid`` is already dead, only its group is killed. Its descendants need `kill_marked`.
    """
    folder = None
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        folder = root.environ().get("TMPDIR")
        # A suspended root starts no new processes, but adopts orphans. If this process dies now,
        # the root continues and ends by itself (`die_with_parent`).
        if pid != os.getpid():
            root.suspend()
        _kill_all(lambda: root.children(recursive=True))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if folder is not None:
        _kill_all(lambda: [root])  # its scratch folders are locked until it is dead
        remove_leftovers(folder)


def kill_children() -> None:
    """Kill all descendants of this process, including adopted orphans."""
    this = psutil.Process()
    _kill_all(lambda: this.children(recursive=True))


def _kill_all(list_processes: Callable[[], Iterable[psutil.Process]]) -> None:
    """List and kill processes repeatedly until all are dead, for up to `LONGEST_KILL_S` seconds."""
    deadline, alive = time.monotonic() + LONGEST_KILL_S, True
    while alive and time.monotonic() < deadline:
        alive = False
        for process in list_processes():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive = True
                    process.kill()
        if alive:
            time.sleep(0.005)


def kill_marked(mark: str) -> None:
    """Kill all processes whose environment variable `MARK` has the value ``mark``."""

    def marked() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    yield process

    _kill_all(marked)


def die_with_parent() -> None:
    """Start a thread that kills this process and its descendants when its parent dies."""
    parent = os.getppid()
    # If the parent dies after it suspended this process to kill it (`kill_tree`), the kernel sends
    # SIGCONT, so that the thread continues.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
