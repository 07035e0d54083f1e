"""What Ray could leave behind: processes, actors, placement groups, shared memory."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil


def session_folder(driver_pid):
    """Folder of the Ray that the process started; None before it has."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "aligner.distributed.ray.reaper" in words and str(driver_pid) in words:
            return words[-1]
    return None


def processes_of(folder):
    """Processes that name the folder in their command line or hold a file in it open."""
    return [p.pid for p in psutil.process_iter() if _holds(p, folder)]


def _holds(process, folder):
    if process.pid == os.getpid():
        return False
    with suppress(psutil.Error, OSError):
        if any(folder in word for word in process.cmdline()):
            return True
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(folder):
                    return True
    return False


def wait_for(condition, limit_s, what):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def living_actors():
    """Classes of the actors that are not dead, once those that are dying are."""
    from ray._private.state import state

    def names():
        table = state.actor_table(None)
        return [actor["ActorClassName"] for actor in table.values() if actor["State"] != "DEAD"]

    with suppress(AssertionError):
        wait_for(lambda: not names(), 10, "actors end")
    return names()


def reserved_groups():
    """Placement groups that still hold resources."""
    from ray.util import placement_group_table

    def groups():
        return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]

    with suppress(AssertionError):
        wait_for(lambda: not groups(), 10, "groups are removed")
    return groups()


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
