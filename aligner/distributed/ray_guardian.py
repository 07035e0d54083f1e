"""Ends what a Ray of a run's own leaves behind, however the run ends.

A process beside the driver, which `ray_session` starts: while the driver lives, it notes Ray's
processes below it; once the driver is gone (its end of a pipe closes), whatever of them still runs
is killed and their folder is removed. Ray ends most of them itself, some minutes late, and nobody
its folder.

    python -m aligner.distributed.ray_guardian DRIVER_PID FOLDER < pipe | pipe

It leaves the driver's family, for Ray kills the driver's children when it disconnects, and closes
its standard output when all is done.
"""

import os
import select
import shutil
import sys
from contextlib import suppress

import psutil

_LOOK_S = 0.5  # between looks at the processes
_END_S = 5.0  # for processes to end by themselves


def main(driver_pid: int, folder: str) -> None:
    """Watch until standard input ends, then clear up."""
    seen: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        driver = psutil.Process(driver_pid)
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            seen |= {process.pid: process for process in processes_of(driver, folder)}
            seen = {pid: process for pid, process in seen.items() if process.is_running()}
    _, alive = psutil.wait_procs(list(seen.values()), timeout=_END_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(driver: psutil.Process, folder: str) -> list[psutil.Process]:
    """Ray's processes below ``driver``: children that name its folder, and all below those."""
    found: list[psutil.Process] = []
    for child in driver.children():
        with suppress(psutil.NoSuchProcess):
            if any(folder in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    main(int(sys.argv[1]), sys.argv[2])
