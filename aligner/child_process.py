"""Code of a user's in processes of its own, which can be killed when it hangs.

`ChildProcess` is the parent's end, `Channel` the child's. Messages are pickled tuples. Parent to
child: first what the child is to load, then ``(number, ...)``. Child to parent: ``(number, kind,
payload)`` with the number of the message that is answered, 0 before the first. Kinds that the
parent knows by itself: ``"ready", payload`` once the code is loaded, and ``"refused", (name of an
AlignerError, text)``.

This module imports neither torch nor numpy: it is loaded by every child.
"""

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil

from aligner import errors
from aligner.errors import AlignerError
from aligner.importing import text_of

# Importing the user's module is not part of its time limit, but must end some time.
_START_LIMIT_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_KILL_S = 2.0  # spent on descendants that do not end

_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)


@dataclass(frozen=True)
class Wording:
    """Errors of a child, and how they speak of it.

    ``name``: what runs there, such as ``reward function 'f'``. ``remedy``: what to do where it does
    not answer in time. ``error``, ``timeout``: the errors that are raised.
    """

    name: str
    remedy: str
    error: type[AlignerError]
    timeout: type[AlignerError]


class ChildProcess:
    """A child process that runs ``main(channel)`` of a module of this library.

    Not ``multiprocessing.Process``: spawn would import the training script again, and fork does
    not survive the threads of torch. Whatever the child starts is killed with it, and it ends by
    itself when this process is gone. Messages carry a number: what code that forks answers twice is
    no answer to the next message.
    """

    def __init__(
        self, module: str, first: Any, wording: Wording, *, most_bytes: int = 2**30
    ) -> None:
        """Start the child and send it ``first``; `wait_until_ready` must follow.

        ``most_bytes``: of one answer.
        """
        self._wording, self._most_bytes = wording, most_bytes
        self._number = 0  # of the message that was sent last
        self._connection, channel = Pipe()
        with channel:
            arguments = [json.dumps(sys.path), module, str(channel.fileno())]
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=[channel.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._stop = weakref.finalize(self, _kill, self._child, self._connection, os.getpid())
        self._connection.send(first)

    def wait_until_ready(self) -> Any:
        """Payload of the child's first answer; what it refused is raised."""
        try:
            return self.receive(time.monotonic() + _START_LIMIT_S, _START_LIMIT_S)[1]
        except AlignerError:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """True if it can take another message."""
        return self._stop.alive and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def ask(self, *message: Any) -> None:
        """Send a message; ``receive`` must follow."""
        self._number += 1
        try:
            self._connection.send((self._number, *message))
        except OSError as error:
            raise self._died() from error

    def receive(self, deadline: float, time_limit_s: float) -> tuple[str, Any]:
        """Kind and payload of the next answer to the message that was sent last.

        Args:
            deadline: ``time.monotonic()`` at which the wait ends; the child is then killed.
            time_limit_s: the time limit that ``deadline`` came from, for the error.
        """
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise self._wording.timeout(
                        f"{self._wording.name} did not answer within {time_limit_s:g} seconds and "
                        f"was killed; {self._wording.remedy}"
                    )
                message = self._connection.recv_bytes(self._most_bytes)
            except (EOFError, OSError) as error:
                if isinstance(error, AlignerError):
                    raise
                raise self._died() from error
            try:
                number, kind, payload = pickle.loads(message)
            except Exception as error:  # damaged pickles raise nearly anything
                self.close()
                raise self._wording.error(
                    f"the process of {self._wording.name} sent what is no answer "
                    f"({type(error).__name__}); does it write to file descriptors that it did not "
                    "open?"
                ) from error
            if number == self._number:
                if kind == "refused":
                    raise self._refusal(*payload)
                return kind, payload

    def close(self) -> None:
        """Kill the child and everything it started. May be called twice."""
        self._stop()

    def _died(self) -> AlignerError:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        code = self._child.returncode
        self.close()
        return self._wording.error(
            f"the process of {self._wording.name} died (exit code {code}); its output is above"
        )

    def _refusal(self, name: str, text: str) -> AlignerError:
        kind = getattr(errors, name, self._wording.error)
        known = isinstance(kind, type) and issubclass(kind, AlignerError)
        return kind(text) if known else self._wording.error(text)


class Channel:
    """The child's end. From its construction on the process ends with its parent."""

    def __init__(self, number: int) -> None:
        """Open the inherited socket ``number``."""
        adopt_orphans()
        _die_with_parent()
        self._connection = Connection(number)
        self._own = os.getpid()

    def receive(self) -> Any:
        """The parent's next message; EOFError: it has closed the channel."""
        return self._connection.recv()

    def send(self, number: int, kind: str, payload: Any) -> None:
        """Answer message ``number``."""
        if os.getpid() != self._own:  # the user's code forked, and returned in the copy as well
            os._exit(0)
        self._connection.send((number, kind, payload))


def refusal(error: AlignerError) -> tuple[str, tuple[str, str]]:
    """Error by name and text: the class of an error need not be one that the parent can import."""
    return "refused", (type(error).__name__, text_of(error))


@contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """The process ends where the block takes longer than this, and 5 seconds more.

    The parent kills it at the limit. If the parent is gone too, and the block hangs without ever
    letting another Python thread run, this timer (a C thread) still ends it.
    """
    faulthandler.dump_traceback_later(limit_s + 5, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


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
        deadline = time.monotonic() + _LONGEST_KILL_S
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


def _kill(child: "subprocess.Popen[bytes]", connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours is ending: the child is not its own
        return
    connection.close()
    kill_tree(child.pid)
    child.wait()


def _die_with_parent() -> None:
    """End this process and all it started once the parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
