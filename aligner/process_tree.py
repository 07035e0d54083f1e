"""Processes together with their descendants: killed, and found if their parent is gone.

This module imports neither torch nor numpy: every process of user code loads it.
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

# Environment variable of a child and of its descendants, which finds them after the child's death.
MARK = "ALIGNER_CHILD_PROCESS"
LONGEST_KILL_S = 2.0  # spent on descendants that do not end
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found.

    Linux only; elsewhere those that left their parent's session are not found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(pid: int) -> None:
    """Kill process ``pid``, its process group and all its descendants.

    ``pid`` may be this process, which then ends with them. One that is already gone is no error;
    what it leaves behind is found by its mark (`ChildProcess`). Scratch folders that they held in
    the temporary directory of ``pid`` are removed.
    """
    folder = None
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        folder = top.environ().get("TMPDIR")
        if pid != os.getpid():
            top.suspend()  # it starts nothing more, and adopts its children's orphans
        _kill_all(lambda: top.children(recursive=True))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if folder is not None:
        _kill_all(lambda: [top])  # its scratch folders are held until it is dead
        remove_leftovers(folder)


def kill_children() -> None:
    """Kill everything that this process started; orphans too, where it adopted them."""
    own = psutil.Process()
    _kill_all(lambda: own.children(recursive=True))


def _kill_all(found: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill what ``found`` returns until none of it lives, for a while at most."""
    deadline, alive = time.monotonic() + LONGEST_KILL_S, True
    while alive and time.monotonic() < deadline:
        alive = False
        for process in found():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive = True
                    process.kill()
        if alive:
            time.sleep(0.005)


def kill_marked(mark: str) -> None:
    """Kill the processes whose environment has `MARK` with this value, whoever their parent is."""

    def marked() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    yield process

    _kill_all(marked)


def die_with_parent() -> None:
    """End this process and all it started once the parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
