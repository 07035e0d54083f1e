"""Removal of the processes and files that a run's own Ray leaves behind, however the run ends.

A process beside the driver, which `ray_session` starts: while the driver lives, it notes Ray's
processes below it; once the driver is gone (its end of a pipe closes), whatever of them still runs
is killed and their folder is removed. Ray ends most of them itself, some minutes late, and nobody
its folder.

    python -m aligner.distributed.ray.reaper DRIVER_PID FOLDER < pipe | pipe

It leaves the driver's family, for Ray kills the driver's children when it disconnects, and closes
its standard output when all is done.
"""

import os
import select
import shutil
import sys
from collections import defaultdict
from contextlib import suppress

import psutil

_LOOK_S = 2.0  # between looks at the processes; one that is younger ends with its parent
_END_S = 5.0  # for processes to end by themselves


def main(driver_pid: int, folder: str) -> None:
    """Watch until standard input ends, then clear up."""
    seen: dict[int, psutil.Process] = {}
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        found = {process.pid: process for process in processes_of(driver_pid, folder)}
        seen = {pid: process for pid, process in (seen | found).items() if process.is_running()}
    _, alive = psutil.wait_procs(list(seen.values()), timeout=_END_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(driver_pid: int, folder: str) -> list[psutil.Process]:
    """Ray's processes below the driver: children that name its folder, and all below those."""
    children = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process)
    found = [child for child in children[driver_pid] if _names(child, folder)]
    for process in found:  # grows as it goes
        found += children[process.pid]
    return found


def _names(process: psutil.Process, folder: str) -> bool:
    with suppress(psutil.Error):
        return any(folder in word for word in process.cmdline())
    return False


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    main(int(sys.argv[1]), sys.argv[2])
