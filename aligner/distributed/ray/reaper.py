"""Removes the processes and files of a run's Ray cluster, also after the run was killed.

    python -m aligner.distributed.ray.reaper DRIVER_PID FOLDER < pipe | pipe

When the driver ends, the pipe closes, and this process kills Ray's processes. Ray would end them
minutes later. This process is not a child of the driver, because Ray kills the driver's children.
"""

import os
import select
import shutil
import sys
from collections import defaultdict
from contextlib import suppress

import psutil

_POLL_S = 2.0  # interval between scans (younger processes end with their parent)
_END_S = 5.0  # limit of the wait for processes to end


def main(driver_pid: int, folder: str) -> None:
    """Wait until standard input closes, then kill Ray's processes and remove ``folder``."""
    recorded: dict[int, psutil.Process] = {}
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        recorded |= {process.pid: process for process in processes_of(driver_pid, folder)}
        recorded = {pid: process for pid, process in recorded.items() if process.is_running()}
    _, alive = psutil.wait_procs(list(recorded.values()), timeout=_END_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(driver_pid: int, folder: str) -> list[psutil.Process]:
    """Return the driver's children with ``folder`` in the command line, and their descendants."""
    children = defaultdict(list)
    for process in psutil.process_iter(["ppid", "cmdline"]):
        children[process.info["ppid"]].append(process)
    processes = [
        child
        for child in children[driver_pid]
        if any(folder in word for word in child.info["cmdline"] or ())
    ]
    for process in processes:  # the list grows during the loop
        processes += children[process.pid]
    return processes


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    main(int(sys.argv[1]), sys.argv[2])
