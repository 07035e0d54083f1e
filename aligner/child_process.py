"""Code of a user's in processes of its own, which can be killed when it hangs.

`ChildProcess` is the parent's end, `Channel` the child's. Parent to child: pickles, first of what
the child is to load, then of ``(number, ..., time limit in seconds)``. Child to parent: JSON of
`aligner.plain` values, ``[number, kind, payload]`` with the number of the message that is answered,
0 before the first. Nothing that a child writes is unpickled. Kinds that the parent knows by itself:
``"ready", payload`` once the code is loaded, and ``"refused", [name of an AlignerError, text]``.

No wait of the parent's is without end, whatever the child writes or does not read.

This module imports neither torch nor numpy: it is loaded by every child.
"""

import ctypes
import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from aligner import errors
from aligner.errors import AlignerError, DataError
from aligner.importing import text_of
from aligner.plain import plain
from aligner.scratch import ScratchFolder, remove_leftovers

Parsed = TypeVar("Parsed")

# Importing the user's module is not part of its time limit, but must end some time.
_START_LIMIT_S = 300.0
# For the rest of a message of which the first bytes came in time: less than `ended_after` adds.
_BODY_LIMIT_S = 4.0
_SHORTEST_WAIT_S = 0.001
_MOST_VALUES = 2**22  # lists, mappings and commas of an answer
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_KILL_S = 2.0  # spent on descendants that do not end
# Environment variable of a child and of what it starts: by it they are found when the child died.
_MARK = "ALIGNER_CHILD_PROCESS"

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
    not survive the threads of torch. Whatever the child starts is killed with it, its temporary
    directory is removed, and it ends by itself when this process is gone. Messages carry a number:
    what code that forks answers twice is no answer to the next message.
    """

    def __init__(
        self, module: str, first: Any, wording: Wording, *, most_bytes: int = 2**30
    ) -> None:
        """Start the child and send it ``first``; `wait_until_ready` must follow.

        ``most_bytes``: of one answer.
        """
        self._wording, self._most_bytes = wording, most_bytes
        self._number = 0  # of the message that was sent last
        self._answer: bytearray | None = None  # of `has_answer`
        mark, folder = uuid.uuid4().hex, ScratchFolder()
        # Ray's clients look for a running cluster in the temporary directory of this process.
        env = {"RAY_TMPDIR": tempfile.gettempdir(), **os.environ, _MARK: mark}
        own, channel = socket.socketpair()
        self._pipe = _Pipe(own)
        with channel:
            arguments = [json.dumps(sys.path), module, str(channel.fileno())]
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=[channel.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**env, "TMPDIR": folder.path},
            )
        self._stop = weakref.finalize(self, _kill, self._child, (own, folder), os.getpid(), mark)
        with suppress(OSError):  # it is dead or hangs, which `wait_until_ready` will find
            self._pipe.send(self._pickled(first), time.monotonic() + _START_LIMIT_S)

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

    def fileno(self) -> int:
        """File that can be read once an answer, or the end of the child, is there."""
        return self._pipe.socket.fileno()

    def ask(self, *message: Any, time_limit_s: float) -> None:
        """Send a message with its time limit, which bounds the sending too.

        ``receive`` must follow. DataError: the message holds an object that cannot be pickled.
        """
        self._number += 1
        body = self._pickled((self._number, *message, time_limit_s))
        try:
            self._pipe.send(body, time.monotonic() + time_limit_s)
        except TimeoutError as error:
            raise self._timed_out(time_limit_s) from error
        except OSError as error:
            raise self._died() from error

    def has_answer(self) -> bool:
        """Read what the child has sent, without waiting; True if `receive` would not wait."""
        try:
            if self._answer is None:
                self._answer = self._pipe.receive(self._most_bytes, 0.0)
            if _parse_answer(self._answer)[0] != self._number:
                self._answer = None
        except TimeoutError:
            return False
        except Exception:  # `receive` raises it again
            return True
        return self._answer is not None

    def receive(self, deadline: float, time_limit_s: float) -> tuple[str, Any]:
        """Kind and payload of the next answer to the message that was sent last.

        Args:
            deadline: ``time.monotonic()`` at which the wait ends; the child is then killed.
            time_limit_s: the time limit that ``deadline`` came from, for the error.
        """
        while True:
            message = self._next(deadline, time_limit_s)
            number, kind, payload = self.parse(_parse_answer, message)
            if number == self._number:
                if kind == "refused":
                    raise self.parse(self._refusal, payload)
                return kind, payload
            if time.monotonic() > deadline:  # answers to earlier messages, without end
                raise self._timed_out(time_limit_s)

    def parse(self, parse: Callable[[Any], Parsed], value: Any) -> Parsed:
        """``parse(value)`` of what the child sent; where that raises, the child is killed."""
        try:
            return parse(value)
        except Exception as error:  # whatever a damaged answer may cause
            self.close()
            raise self._wording.error(
                f"the process of {self._wording.name} sent what is no answer "
                f"({type(error).__name__}); does it write to file descriptors that it did not "
                "open?"
            ) from error

    def close(self) -> None:
        """Kill the child and everything it started. May be called twice."""
        self._stop()

    def _next(self, deadline: float, time_limit_s: float) -> bytearray:
        answer, self._answer = self._answer, None
        try:
            if answer is not None:
                return answer
            return self._pipe.receive(self._most_bytes, deadline)
        except TimeoutError as error:
            raise self._timed_out(time_limit_s) from error
        except (EOFError, OSError) as error:
            raise self._died() from error
        except OverflowError as error:
            self.close()
            raise self._wording.error(
                f"the process of {self._wording.name} answered with {error} bytes; at most "
                f"{self._most_bytes} are read"
            ) from error

    def _timed_out(self, time_limit_s: float) -> AlignerError:
        self.close()
        return self._wording.timeout(
            f"{self._wording.name} did not answer within {time_limit_s:g} seconds and "
            f"was killed; {self._wording.remedy}"
        )

    def _died(self) -> AlignerError:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        code = self._child.returncode
        self.close()
        return self._wording.error(
            f"the process of {self._wording.name} died (exit code {code}); its output is above"
        )

    def _refusal(self, payload: tuple[str, str]) -> AlignerError:
        name, text = payload
        kind = getattr(errors, name, self._wording.error)
        known = isinstance(kind, type) and issubclass(kind, AlignerError)
        return kind(text) if known else self._wording.error(text)

    def _pickled(self, message: Any) -> bytes:
        try:
            return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of a class of the user's: whatever it raises
            raise DataError(
                f"{self._wording.name} is given an object that cannot travel to its process: "
                f"{text_of(error)}; give rows and arguments numbers, text, lists, mappings, or "
                "functions and objects of classes that have a name in their file"
            ) from error


def _parse_answer(message: bytearray) -> tuple[int, str, Any]:
    """An answer of a child, of plain values. Bounded in depth and number, whoever wrote it."""
    if sum(message.count(mark) for mark in b",[{") > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    number, kind, payload = plain(json.loads(message, parse_constant=_refuse_constant))
    if type(number) is not int or type(kind) is not str:
        raise TypeError(f"{number!r}, {kind!r}")
    return number, kind, payload


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class Channel:
    """The child's end. From its construction on the process ends with its parent."""

    def __init__(self, number: int) -> None:
        """Open the inherited socket ``number``."""
        adopt_orphans()
        _die_with_parent()
        with suppress(OSError):  # where memory runs out, this process goes before its parent
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.set_inheritable(number, False)
        self._pipe = _Pipe(socket.socket(fileno=number))
        self._own = os.getpid()

    def receive(self) -> Any:
        """The parent's next message; EOFError: it has closed the channel."""
        return pickle.loads(self._pipe.receive())

    def send(self, number: int, kind: str, payload: Any) -> None:
        """Answer message ``number``; ``payload`` goes through `plain`."""
        if os.getpid() != self._own:  # the user's code forked, and returned in the copy as well
            os._exit(0)
        self._pipe.send(json.dumps(plain([number, kind, payload])).encode())


class _Pipe:
    """Messages over a socket, each behind a header with its length.

    A deadline is a ``time.monotonic()``, after which TimeoutError is raised; None: there is none,
    0: only what is there is read. What came before a TimeoutError is kept for the next `receive`.
    """

    _HEADER = struct.Struct("!4sQ")
    _BEGIN = b"\x93ALN"

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()  # of the message that comes, header included

    def send(self, body: bytes, deadline: float | None = None) -> None:
        """Send a message; OSError: nobody reads it any more."""
        for part in (self._HEADER.pack(self._BEGIN, len(body)), body):
            self.socket.settimeout(_seconds_to(deadline))
            self.socket.sendall(part)

    def receive(self, most_bytes: int | None = None, deadline: float | None = None) -> bytearray:
        """Return the next message; if something else came, that.

        Raises:
            EOFError: the other end is closed.
            OverflowError: it has more than ``most_bytes``, none of which were read.
        """
        size = self._HEADER.size
        self._read_to(size, deadline)
        begin, length = self._HEADER.unpack(self._received[:size])
        if begin == self._BEGIN:
            if most_bytes is not None and length > most_bytes:
                raise OverflowError(length)
            if deadline:
                deadline = max(deadline, time.monotonic() + _BODY_LIMIT_S)
            self._read_to(size + length, deadline)
            del self._received[:size]
        message, self._received = self._received, bytearray()
        return message

    def _read_to(self, count: int, deadline: float | None) -> None:
        """Read until ``count`` bytes of the message are received."""
        while (missing := count - len(self._received)) > 0:
            self.socket.settimeout(_seconds_to(deadline))
            try:
                piece = self.socket.recv(min(missing, 2**20))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError
            self._received += piece
            if len(piece) < missing and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError


def _seconds_to(deadline: float | None) -> float | None:
    """Seconds that are left; never 0, by which a socket would mean something else."""
    return None if deadline is None else max(_SHORTEST_WAIT_S, deadline - time.monotonic())


def refusal(error: AlignerError) -> tuple[str, tuple[str, str]]:
    """Error by name and text: the class of an error need not be one that the parent can import."""
    return "refused", (type(error).__name__, text_of(error))


def limit_memory(mebibytes: int) -> None:
    """Bound what this process, and each that it starts, may allocate; MemoryError beyond.

    Memory that is shared or mapped from files does not count (``RLIMIT_DATA``).
    """
    size = mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


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
    deadline, alive = time.monotonic() + _LONGEST_KILL_S, True
    while alive and time.monotonic() < deadline:
        alive = False
        for process in found():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive = True
                    process.kill()
        if alive:
            time.sleep(0.005)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                yield process


def _kill(
    child: "subprocess.Popen[bytes]",
    held: tuple[socket.socket, ScratchFolder],
    owner: int,
    mark: str,
) -> None:
    if os.getpid() != owner:  # a fork of ours is ending: the child is not its own
        return
    held[0].close()
    if child.poll() is None:
        kill_tree(child.pid)
    else:  # its descendants have other parents by now
        _kill_all(lambda: _marked(mark))
    with suppress(subprocess.TimeoutExpired):
        child.wait(_LONGEST_KILL_S)
    held[1].close()


def _die_with_parent() -> None:
    """End this process and all it started once the parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
