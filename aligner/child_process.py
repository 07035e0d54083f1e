"""Processes of user code, which are killed if they hang.

`ProcessPool` and `ChildProcess` are the parent's end, `serve` is the child's. Parent to child:
pickles, first ``(memory limit, *what is loaded)``, then ``(number, *message, time limit in
seconds)``. Child to parent: JSON of `aligner.plain` values, ``[number, kind, payload]`` with the
number of the message that is answered, 0 before the first. Nothing that a child writes is
unpickled. The kinds of this module: ``"ready", payload`` once the code is loaded, and ``"refused",
[name of an AlignerError, text]``. All others are those of the code that is loaded.

Every wait of the parent ends, whatever the child writes or does not read.

This module imports neither torch nor numpy: every child loads it.
"""

import faulthandler
import json
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from aligner import errors
from aligner.errors import AlignerError, DataError
from aligner.importing import text_of
from aligner.plain import plain
from aligner.process_tree import (
    LONGEST_KILL_S,
    MARK,
    adopt_orphans,
    die_with_parent,
    kill_marked,
    kill_tree,
)
from aligner.scratch import ScratchFolder

Parsed = TypeVar("Parsed")
# Kinds and payloads of the answers to one message.
Answers = Iterable[tuple[str, Any]]

# Importing the user's module is not part of its time limit, but must end some time.
_START_LIMIT_S = 300.0
# For the rest of a message that has begun in time: less than `serve` adds to a limit.
_BODY_LIMIT_S = 4.0
_SHORTEST_WAIT_S = 0.001
_MOST_VALUES = 2**22  # lists, mappings and commas of an answer

_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from aligner.child_process import serve; "
    "serve(int(sys.argv[3]), importlib.import_module(sys.argv[2]).load)"
)


@dataclass(frozen=True)
class Program:
    """Code that child processes run, and the errors that the parent raises for it.

    ``module``: its ``load(*first)`` returns the payload of ``ready`` and the function that answers
    messages (see `serve`); ``first``: the arguments, pickled. ``name``: the code in error messages,
    such as ``reward function 'f'``. ``remedy``: for an answer that comes too late. ``memory_mb``:
    mebibytes that a process may allocate. None means no limit. ``most_bytes``: of one answer.
    """

    module: str
    first: tuple[Any, ...]
    name: str
    remedy: str
    error: type[AlignerError]
    timeout: type[AlignerError]
    memory_mb: int | None = None
    most_bytes: int = 2**30


class ChildProcess:
    """A child process that runs a `Program`.

    Not ``multiprocessing.Process``: spawn would import the training script again, and fork does
    not survive the threads of torch. Whatever the child starts is killed with it, its temporary
    directory is removed, and it ends by itself when this process is gone. Messages carry a number:
    if user code forks and answers twice, the second answer is not taken for the next message's.
    """

    def __init__(self, program: Program) -> None:
        """Start the child and send it what to load; `wait_until_ready` must follow."""
        self._program = program
        self._number = 0  # of the message that was sent last
        self._message: bytearray | None = None  # received, and not yet returned by `receive`
        mark, folder = uuid.uuid4().hex, ScratchFolder()
        # Ray's clients look for a running cluster in the temporary directory of this process.
        env = {"RAY_TMPDIR": tempfile.gettempdir(), **os.environ, MARK: mark}
        parent_end, child_end = socket.socketpair()
        self._pipe = _Pipe(parent_end)
        with child_end:
            arguments = [json.dumps(sys.path), program.module, str(child_end.fileno())]
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**env, "TMPDIR": folder.path},
            )
        self._stop = weakref.finalize(
            self, _kill, self._child, (parent_end, folder), os.getpid(), mark
        )
        first = self._pickled((program.memory_mb, *program.first))
        with suppress(OSError):  # the child is dead or hangs: `wait_until_ready` raises the error
            self._pipe.send(first, time.monotonic() + _START_LIMIT_S)

    def wait_until_ready(self) -> Any:
        """Payload of the child's first answer; an error of loading is raised."""
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
        """File that is readable once the child has answered or ended."""
        return self._pipe.socket.fileno()

    def ask(self, *message: Any, time_limit_s: float) -> None:
        """Send a message with its time limit, which bounds the sending too.

        ``receive`` must follow. DataError: the message holds an object that cannot be pickled.
        """
        self._number += 1
        body = self._pickled((self._number, *message, time_limit_s))
        try:
            self._pipe.send(body, time.monotonic() + time_limit_s)
        except OSError as error:
            raise self._silence(error, time_limit_s) from error

    def has_answer(self) -> bool:
        """Read what the child has sent, without waiting; True if `receive` would not wait."""
        try:
            self._read(0.0)
        except TimeoutError:
            return False
        except Exception:  # `receive` raises it again
            return True
        return True

    def receive(self, deadline: float, time_limit_s: float) -> tuple[str, Any]:
        """Kind and payload of the next answer to the message that was sent last.

        Args:
            deadline: ``time.monotonic()`` at which the wait ends; the child is then killed.
            time_limit_s: the time limit that ``deadline`` came from, for the error.
        """
        try:
            kind, payload = self._read(deadline)
        except (EOFError, OSError) as error:
            raise self._silence(error, time_limit_s) from error
        except OverflowError as error:
            most = self._program.most_bytes
            raise self._failed(f"answered with {error} bytes; at most {most} are read") from error
        except Exception as error:
            raise self._no_answer(error) from error
        self._message = None
        if kind == "refused":
            raise self.parse(self._refusal, payload)
        return kind, payload

    def parse(self, parse: Callable[[Any], Parsed], value: Any) -> Parsed:
        """``parse(value)`` of what the child sent; if that raises, the child is killed."""
        try:
            return parse(value)
        except Exception as error:  # whatever a damaged answer may cause
            raise self._no_answer(error) from error

    def close(self) -> None:
        """Kill the child and everything it started. May be called twice."""
        self._stop()

    def _read(self, deadline: float) -> tuple[str, Any]:
        """Kind and payload of the answer to the last message; a second call returns it again.

        Answers to earlier messages are dropped.
        """
        while True:
            if self._message is None:
                self._message = self._pipe.receive(self._program.most_bytes, deadline)
            number, kind, payload = _parse_answer(self._message)
            if number == self._number:
                return kind, payload
            self._message = None
            if time.monotonic() > deadline:
                raise TimeoutError

    def _silence(self, error: OSError | EOFError, time_limit_s: float) -> AlignerError:
        """Error of a child that is late or dead; it is killed."""
        if isinstance(error, TimeoutError):
            self.close()
            return self._program.timeout(
                f"{self._program.name} did not answer within {time_limit_s:g} seconds and "
                f"was killed; {self._program.remedy}"
            )
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        return self._failed(f"died (exit code {self._child.returncode}); its output is above")

    def _no_answer(self, error: Exception) -> AlignerError:
        return self._failed(
            f"sent what is no answer ({type(error).__name__}); does it write to file descriptors "
            "that it did not open?"
        )

    def _failed(self, problem: str) -> AlignerError:
        self.close()
        return self._program.error(f"the process of {self._program.name} {problem}")

    def _refusal(self, payload: tuple[str, str]) -> AlignerError:
        """The error by its name; the class may be one that the parent cannot import."""
        name, text = payload
        kind = getattr(errors, name, self._program.error)
        known = isinstance(kind, type) and issubclass(kind, AlignerError)
        return kind(text) if known else self._program.error(text)

    def _pickled(self, message: Any) -> bytes:
        try:
            return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a user's class may raise anything
            raise DataError(
                f"{self._program.name} is given an object that cannot travel to its process: "
                f"{text_of(error)}. Give rows and arguments numbers, text, lists, mappings, or "
                "functions and objects of classes that have a name in their file"
            ) from error


class ProcessPool:
    """Child processes of one program by slot, which are started when needed and then kept."""

    def __init__(self, program: Program) -> None:
        """Start the first process, so that code that cannot be loaded is refused now."""
        self._program = program
        self._processes = {0: self._started()}
        self.loaded = self._processes[0].wait_until_ready()  # payload of ``ready``

    def start(self, slots: Sequence[int]) -> dict[int, AlignerError]:
        """Start the processes of ``slots`` that are not alive, at the same time.

        Returns the error of each slot whose process died or did not load the code in time.
        """
        known = self._processes
        missing = [slot for slot in slots if not (slot in known and known[slot].alive)]
        for slot in missing:
            known[slot] = self._started()
        failed: dict[int, AlignerError] = {}
        for slot in missing:
            try:
                known[slot].wait_until_ready()
            except self._program.error as error:
                failed[slot] = error
        return failed

    def kill(self, slot: int) -> None:
        """Kill a slot's process and all that it started; the next `start` starts it again."""
        self._processes[slot].close()

    def close(self) -> None:
        """Kill all processes. `start` starts them again."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def pid(self, slot: int) -> int:
        """Process id of a slot's process."""
        return self._processes[slot].pid

    def _started(self) -> ChildProcess:
        return ChildProcess(self._program)


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
    """The child's end."""

    def __init__(self, number: int) -> None:
        """Open the inherited socket ``number``."""
        os.set_inheritable(number, False)
        self._pipe = _Pipe(socket.socket(fileno=number))
        self._pid = os.getpid()

    def receive(self) -> Any:
        """The parent's next message; EOFError: it has closed the channel."""
        return pickle.loads(self._pipe.receive())

    def send(self, number: int, kind: str, payload: Any) -> None:
        """Answer message ``number``; ``payload`` goes through `plain`."""
        if os.getpid() != self._pid:  # the user's code forked, and returned in the copy as well
            os._exit(0)
        self._pipe.send(json.dumps(plain([number, kind, payload])).encode())

    def refuse(self, number: int, error: AlignerError) -> None:
        """Answer with the name of an error: the parent may be unable to import its class."""
        self.send(number, "refused", (type(error).__name__, text_of(error)))


def serve(socket_number: int, load: Callable[..., tuple[Any, Callable[..., Answers]]]) -> None:
    """Answer the parent's messages on an inherited socket until the parent closes it or is gone.

    ``load`` is called with the first message. It returns the payload of ``ready``, and a function
    that is called with each further message and yields the kinds and payloads of its answers. If
    either raises an `AlignerError`, the parent raises it, too.
    """
    adopt_orphans()
    die_with_parent()
    with suppress(OSError):  # where memory runs out, this process goes before its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    channel = Channel(socket_number)
    try:
        memory_mb, *first = channel.receive()
        if memory_mb is not None:  # memory that is shared or mapped from files does not count
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20,) * 2)
        loaded, answers = load(*first)
    except AlignerError as error:
        channel.refuse(0, error)
        return
    channel.send(0, "ready", loaded)
    while True:
        try:
            number, *message, limit_s = channel.receive()
        except (EOFError, ConnectionResetError):
            return
        # The parent kills this process at the limit. If the parent is gone too, and the user's code
        # hangs without letting another Python thread run, this timer (a C thread) ends it.
        faulthandler.dump_traceback_later(limit_s + 5, exit=True)
        try:
            for kind, payload in answers(*message):
                channel.send(number, kind, payload)
        except AlignerError as error:
            channel.refuse(number, error)
        finally:
            faulthandler.cancel_dump_traceback_later()


class _Pipe:
    """Messages over a socket, each behind a header with its length.

    A deadline is a ``time.monotonic()``, after which TimeoutError is raised. None means there is
    none, 0: only what is there is read. What came before a TimeoutError is kept for the next
    `receive`.
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
            piece = self.socket.recv(min(missing, 2**20))
            if not piece:
                raise EOFError
            self._received += piece
            if len(piece) < missing and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError


def _seconds_to(deadline: float | None) -> float | None:
    """Seconds that are left; never 0, by which a socket would mean something else."""
    return None if deadline is None else max(_SHORTEST_WAIT_S, deadline - time.monotonic())


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
        kill_marked(mark)
    with suppress(subprocess.TimeoutExpired):
        child.wait(LONGEST_KILL_S)
    held[1].close()
