"""Sandboxed programs: each in a process that drops its privileges and then runs the program.

The process (`aligner.examples.tasks.sandbox_process`) has no environment variables of the run, and
an empty folder that is removed afterwards. It is killed with its children at its time limit, if it
prints too much or creates too many files and folders, and when its parent process ends.

Only its standard output is read, as bytes. These programs are written by the policy, so they have
fewer privileges than a `ChildProcess` of `aligner.child_process`, which runs the user's code.
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
_MAX_OUTPUT = 3000  # bytes
_MAX_ENTRIES, _MAX_DEPTH = 10_000, 100  # number of files and folders, and nesting of folders
_POLL_S = 0.05  # between two counts of files and folders


@cache
def check_isolation(isolation: Isolation) -> None:
    """Refuse an isolation that this machine does not support. Runs once per process."""
    output, problem = run_program("print('ran')", 60.0, 256, isolation)
    if output.strip() != b"ran":
        raise ConfigError(
            f"interpreter: isolation={isolation} cannot be had here ({problem or 'no output'}): it "
            "needs Linux 6.2 or later with Landlock and seccomp, on x86_64 or aarch64. "
            "isolation=python is weaker, and works anywhere"
        )


def run_program(
    code: str, timeout_s: float, memory_mb: int, isolation: Isolation
) -> tuple[bytes, str | None]:
    """Run a Python program. Returns the output, and why the program was ended, or None.

    Args:
        code: the program. If its last line is an expression, the value is printed.
        timeout_s: time limit in seconds, from the start of the process on.
        memory_mb: address space of the program, in MiB.
        isolation: ``kernel``: the kernel denies network, other processes, and files outside of the
            folder except libraries (Linux 6.2 or later). ``python``: an audit hook denies the same,
            but malicious programs can evade it. `check_isolation` tests whether this machine
            supports it.
    """
    settings = {
        "parent": os.getpid(),
        "memory_mb": memory_mb,
        "cpu_s": math.ceil(timeout_s) + 1,
        "isolation": isolation,
    }
    variables = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    # -I ignores variables and the user's packages, -S site packages, -B writes no compiled files.
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
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, **variables},
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
    # The first line names the active layers of isolation.
    first_line, _, output = output.partition(b"\n")
    layers = first_line.decode(errors="replace")
    if layers != _LAYERS[isolation]:
        return b"", problem or f"active layers: {layers or 'none'}"
    if problem is None and status < 0:
        problem = f"ended by {signal.Signals(-status).name}"
    return output, problem


def _read(
    process: "subprocess.Popen[bytes]", folder: str, deadline: float, timeout_s: float
) -> tuple[bytes, str | None]:
    """Read the output until the process has ended, without reaping the process.

    Returns the output and, if the process must be killed, the reason.
    """
    assert process.stdout is not None
    output, is_open, next_count = b"", True, 0.0
    max_bytes = _MAX_OUTPUT + 1 + max(map(len, _LAYERS.values()))
    # Read while the pipe is open, then wait for the end of the process.
    while (now := time.monotonic()) < deadline:
        if now >= next_count:
            if _has_too_many_files(folder):
                return output, f"stopped at {_MAX_ENTRIES} files, or {_MAX_DEPTH} nested folders"
            next_count = time.monotonic() + _POLL_S
        if is_open:
            if wait([process.stdout.fileno()], min(_POLL_S, deadline - now)):
                part = os.read(process.stdout.fileno(), 2**16)
                output, is_open = output + part, bool(part)
            if len(output) > max_bytes:
                return output[:max_bytes], f"stopped after {_MAX_OUTPUT} bytes of output"
        elif os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        else:
            return output, None
    return output, f"stopped after {timeout_s:g} seconds"


def _has_too_many_files(folder: str) -> bool:
    count, folders = 0, [(folder, 1)]
    while folders:
        path, depth = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_ENTRIES or depth > _MAX_DEPTH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
        except OSError as error:  # the program may remove or close the folder
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False
