"""Programs without rights: each in a process that gives its rights away, then runs the program.

The process (`aligner.environments.sandbox_process`) has no environment variables of the run, and an
empty folder that is removed afterwards. It is killed with all it started at its time limit, if it
prints too much or makes too many files and folders, and when the process that asked for it ends.

Its standard output is all that is read of it, as bytes. A `ChildProcess` of
`aligner.child_process` holds code of the user's; a program of the policy has fewer rights.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

from aligner.errors import ConfigError
from aligner.process_tree import kill_tree
from aligner.scratch import ScratchFolder

Isolation = Literal["kernel", "python"]
_SCRIPT = Path(__file__).with_name("sandbox_process.py")
_LAYERS = {"kernel": "landlock seccomp", "python": "python"}
_MOST_OUTPUT = 3000  # bytes
_MOST_ENTRIES, _MOST_DEPTH = 10_000, 100  # files and folders of a program, one in the other
_LOOK_S = 0.05  # between two counts of them


@cache
def check_isolation(isolation: Isolation) -> None:
    """Refuse an isolation that this machine does not have; asked once a process."""
    output, problem = run_program("print('ran')", 60.0, 256, isolation)
    if output.strip() != b"ran":
        raise ConfigError(
            f"interpreter: isolation={isolation} cannot be had here ({problem or 'no output'}): it "
            "needs Linux from 6.2 with Landlock and seccomp, on x86_64 or aarch64; "
            "isolation=python is weaker and needs neither"
        )


def run_program(
    code: str, timeout_s: float, memory_mb: int, isolation: Isolation
) -> tuple[bytes, str | None]:
    """Run a Python program; returns its output, and why it did not end by itself (None: it did).

    Args:
        code: the program. The value of its last line is printed if that is an expression.
        timeout_s: longest time of the program, in seconds, its start included.
        memory_mb: address space of the program, in MiB.
        isolation: ``kernel``: the program reaches no network, no other process and no file outside
            of its folder, but for libraries, whatever it does (Linux from 6.2). ``python``: an
            audit hook refuses the same, which a program that wants to can get around.
            `check_isolation` tests once a process whether this machine has it.
    """
    settings = {
        "parent": os.getpid(),
        "memory_mb": memory_mb,
        "cpu_s": math.ceil(timeout_s) + 1,
        "isolation": isolation,
    }
    kept = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    # Isolated from variables and the user's packages, no site packages, no compiled files written.
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT), json.dumps(settings)]
    with closing(ScratchFolder()) as scratch:
        folder = scratch.path
        deadline = time.monotonic() + timeout_s
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, **kept},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(code.encode())
            output, problem = _read(process, folder, deadline, timeout_s)
        finally:
            kill_tree(process.pid)
            status = process.wait()
            if process.stdout is not None:
                process.stdout.close()
    layers, _, output = output.partition(b"\n")
    if layers.decode(errors="replace") != _LAYERS[isolation]:
        held = layers.decode(errors="replace") or "none"
        return b"", problem or f"layers that hold: {held}"
    if problem is None and status < 0:
        problem = f"ended by {signal.Signals(-status).name}"
    return output, problem


def _read(
    process: "subprocess.Popen[bytes]", folder: str, deadline: float, timeout_s: float
) -> tuple[bytes, str | None]:
    """Output until the process has ended; it still has its process id."""
    assert process.stdout is not None
    output, is_open, next_look = b"", True, 0.0
    most = _MOST_OUTPUT + 1 + max(map(len, _LAYERS.values()))
    while (now := time.monotonic()) < deadline:
        if now >= next_look:
            if _has_too_many(folder):
                return output, f"stopped at {_MOST_ENTRIES} files, or {_MOST_DEPTH} nested folders"
            next_look = time.monotonic() + _LOOK_S
        if is_open:
            if wait([process.stdout.fileno()], min(_LOOK_S, deadline - now)):
                part = os.read(process.stdout.fileno(), 2**16)
                output, is_open = output + part, bool(part)
            if len(output) > most:
                return output[:most], f"stopped after {_MOST_OUTPUT} bytes of output"
        elif os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        else:
            return output, None
    return output, f"stopped after {timeout_s:g} seconds"


def _has_too_many(folder: str) -> bool:
    count, folders = 0, [(folder, 1)]
    while folders:
        path, depth = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > _MOST_ENTRIES or depth > _MOST_DEPTH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
        except OSError as error:  # the program may remove and close folders meanwhile
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False
