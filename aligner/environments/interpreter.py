"""A Python interpreter as a tool: programs of the policy, each in a process without rights.

Every call starts a process of its own (`aligner.environments.sandbox`), without the environment
variables of the run, in an empty folder that is removed afterwards. It is killed with all it
started at its time limit, where it prints too much or makes too many files and folders, and when
the process that asked for it ends.

Its standard output is all that is read of it, as text. A `ChildProcess` of `aligner.child_process`
holds code of the user's; a program of the policy has fewer rights.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, get_args

from aligner.child_process import kill_tree
from aligner.environments.calls import Form
from aligner.environments.tools import Calculation
from aligner.errors import ConfigError
from aligner.scratch import ScratchFolder

Isolation = Literal["kernel", "python"]
_SCRIPT = Path(__file__).with_name("sandbox.py")
_LAYERS = {"kernel": "landlock seccomp", "python": "python"}
_MOST_CODE = 20_000  # characters
_MOST_OUTPUT = 3000  # bytes
_MOST_ENTRIES, _MOST_DEPTH = 10_000, 100  # files and folders of a program, one in the other
_LOOK_S = 0.05  # between two counts of them
_LEAST_MEMORY_MB = 64  # Python itself needs about half of it


class Interpreter:
    """Runs Python programs, each by itself.

    Args:
        timeout_s: longest time of a program, in seconds, its start included.
        memory_mb: address space of a program, in MiB.
        isolation: ``kernel``: a program reaches no network, no other process and no file outside of
            its folder, but for libraries, whatever it does (Linux from 6.2). ``python``: an audit
            hook refuses the same, which a program that wants to can get around.

    Raises:
        ConfigError: a value that cannot work, or a kernel without what ``isolation=kernel`` needs.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        isolation: Isolation = "kernel",
    ) -> None:
        if isolation not in get_args(Isolation):
            raise ConfigError(
                f"interpreter: isolation={isolation!r} is not one of "
                f"{', '.join(get_args(Isolation))}"
            )
        if not timeout_s > 0 or memory_mb < _LEAST_MEMORY_MB:
            raise ConfigError(
                f"interpreter: timeout_s={timeout_s} must be above 0, and memory_mb={memory_mb} at "
                f"least {_LEAST_MEMORY_MB}"
            )
        self._timeout_s, self._memory_mb, self._isolation = timeout_s, memory_mb, isolation
        check_isolation(isolation)

    def python(self, code: str) -> str:
        """Run a Python program; returns what it prints, and the value of its last line.

        Args:
            code: The program. It has the standard library, no network and no earlier variables.
        """
        if len(code) > _MOST_CODE:
            raise ValueError(f"the program is longer than {_MOST_CODE} characters")
        output, problem = _result_of(code, self._timeout_s, self._memory_mb, self._isolation)
        text = output.decode(errors="replace").rstrip("\n")
        lines = [text, *([] if problem is None else [f"error: {problem}"])]
        return "\n".join(line for line in lines if line) or "(no output)"


@cache
def check_isolation(isolation: Isolation) -> None:
    """Refuse an isolation that this machine does not have; asked once a process."""
    output, problem = _result_of("print('ran')", 60.0, 256, isolation)
    if output.strip() != b"ran":
        raise ConfigError(
            f"interpreter: isolation={isolation} cannot be had here ({problem or 'no output'}): it "
            "needs Linux from 6.2 with Landlock and seccomp, on x86_64 or aarch64; "
            "isolation=python is weaker and needs neither"
        )


class Programming(Calculation):
    """Problems with a number as answer, and a Python interpreter.

    Columns, reward and the further arguments are those of `Calculation`; ``timeout_s``,
    ``memory_mb`` and ``isolation`` those of `Interpreter`.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str,
        ground_truth: str,
        form: Form = "hermes",
        call_reward: float | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        isolation: Isolation = "kernel",
        **columns: Any,
    ) -> None:
        """Offer the interpreter."""
        self._interpreter = Interpreter(
            timeout_s=timeout_s, memory_mb=memory_mb, isolation=isolation
        )
        super().__init__(
            seed=seed,
            prompt=prompt,
            ground_truth=ground_truth,
            form=form,
            call_reward=call_reward,
            **columns,
        )

    def tools(self) -> Sequence[Callable[..., Any]]:
        """The interpreter."""
        return [self._interpreter.python]


def _result_of(
    code: str, timeout_s: float, memory_mb: int, isolation: Isolation
) -> tuple[bytes, str | None]:
    """Output of a program, and why it did not end by itself; None: it did."""
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
