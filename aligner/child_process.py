"""Child processes for user code, with time limits, memory limits and a typed protocol.

    parent                                                    child
    ProcessPool ─ ChildProcess     pickled messages      ─►   serve ─► Program.module.load(...)
                                ◄─ JSON answers               Channel   user code

The first message is ``(memory limit, *arguments of load)``, the others are ``(message id, *message,
time limit in seconds)``. An answer is ``[message id, kind, payload]`` in JSON. Its kind is "ready"
once the code is loaded, "refused" (the payload is the class name of an `AlignerError` and a text),
or a kind that the user code defines. The parent never unpickles data of a child, and every wait of
the parent has a time limit. This module imports neither torch nor numpy.
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
from typing import Any, NoReturn, Self, TypeVar

from aligner import process_tree
from aligner.errors import AlignerError, DataError, error_class
from aligner.importing import text_of
from aligner.plain import plain
from aligner.scratch import ScratchFolder

Parsed = TypeVar("Parsed")
Answers = Iterable[tuple[str, Any]]  # kinds and payloads of the answers to one message

_START_LIMIT_S = 300.0  # time limit for importing the user's module
# Time limit for the rest of a message after its header. `serve` ends a child later than this.
_BODY_LIMIT_S = 4.0
_SHORTEST_WAIT_S = 0.001
_MOST_VALUES = 2**22  # maximum number of lists, mappings and commas in an answer

_INVALID = (
    "sent an invalid answer ({}). Check whether the code writes to file descriptors that it did "
    "not open"
)
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from aligner.child_process import serve; "
    "serve(int(sys.argv[3]), importlib.import_module(sys.argv[2]).load)"
)


@dataclass(frozen=True)
class Program:
    """Code that child processes run, and the errors for its failures."""

    module: str  # module with the function ``load``, see `serve`
    load_arguments: tuple[Any, ...]  # are pickled
    name: str  # for error messages, such as ``reward function 'f'``
    remedy: str  # end of the error after the time limit
    error: type[AlignerError]  # raised if the child fails
    timeout: type[AlignerError]  # raised after the time limit
    memory_mb: int | None = None  # MiB that a process may allocate (None: no limit)
    most_bytes: int = 2**30  # maximum size of an answer


class ChildProcess:
    """Child process that runs a `Program`. It ends if this process dies.

    With the child, all its descendants are killed and its temporary directory is removed. If user
    code forks and both processes answer, the second answer is ignored. ``multiprocessing`` is not
    used: "spawn" would import the training script again, and "fork" is unsafe with torch's threads.
    """

    def __init__(self, program: Program) -> None:
        """Start the child and send it the arguments of ``load``. Then call `wait_until_ready`."""
        self._program = program
        self._message_id = 0  # id of the last message
        self._message: bytearray | None = None  # answer that `receive` has not returned yet
        mark, folder = uuid.uuid4().hex, ScratchFolder()
        # Ray's clients search the temporary directory of this process for a running cluster.
        env = {"RAY_TMPDIR": tempfile.gettempdir(), **os.environ, process_tree.MARK: mark}
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
            self, _kill, self._child, parent_end, folder, os.getpid(), mark
        )
        first = self._pickled((program.memory_mb, *program.load_arguments))
        with suppress(OSError):  # if the child is dead or hangs, `wait_until_ready` raises an error
            self._pipe.send(first, time.monotonic() + _START_LIMIT_S)

    def wait_until_ready(self) -> Any:
        """Wait until ``load`` has returned in the child. Return its payload, or raise its error."""
        try:
            return self.receive(time.monotonic() + _START_LIMIT_S, _START_LIMIT_S)[1]
        except AlignerError:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """True if the child runs and `close` was not called."""
        return self._stop.alive and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the child answers or ends."""
        return self._pipe.socket.fileno()

    def ask(self, *message: Any, time_limit_s: float) -> None:
        """Send a message, to be answered within ``time_limit_s`` seconds. Then call `receive`.

        Raises `DataError` if the message cannot be pickled, and the errors of `Program` if the
        child has died or does not accept the message in time.
        """
        self._message_id += 1
        body = self._pickled((self._message_id, *message, time_limit_s))
        try:
            self._pipe.send(body, time.monotonic() + time_limit_s)
        except OSError as error:
            raise self._error(error, time_limit_s) from error

    def has_answer(self) -> bool:
        """Return whether `receive` would return, or raise an error, without waiting."""
        try:
            self._read(0.0)
        except Exception as error:  # `receive` raises it again
            return not isinstance(error, TimeoutError)
        return True

    def receive(self, deadline: float, time_limit_s: float) -> tuple[str, Any]:
        """Wait for the next answer to the last message. Return (kind, payload).

        ``deadline``: time of ``time.monotonic()`` at which the child is killed. ``time_limit_s``:
        time limit in the error message. Raises the errors of `Program`, or an error of the child.
        """
        try:
            kind, payload = self._read(deadline)
        except Exception as error:
            raise self._error(error, time_limit_s) from error
        self._message = None
        if kind == "refused":
            raise self.parse(self._refusal, payload)
        return kind, payload

    def parse(self, parse: Callable[[Any], Parsed], value: Any) -> Parsed:
        """Return ``parse(value)`` for a payload of the child. If it raises, kill the child."""
        try:
            return parse(value)
        except Exception as error:  # an invalid answer may cause any exception
            raise self._failed(_INVALID.format(type(error).__name__)) from error

    def close(self) -> None:
        """Kill the child and all its descendants. Later calls have no effect."""
        self._stop()

    def _read(self, deadline: float) -> tuple[str, Any]:
        """Return (kind, payload) of an answer to the last message. Skip answers to earlier ones."""
        while True:
            if self._message is None:
                self._message = self._pipe.receive(self._program.most_bytes, deadline)
            message_id, kind, payload = _parse_answer(self._message)
            if message_id == self._message_id:
                return kind, payload
            self._message = None
            if time.monotonic() > deadline:
                raise TimeoutError

    def _error(self, error: Exception, time_limit_s: float) -> AlignerError:
        """Kill the child because of ``error``. Return the error of `Program` to raise instead."""
        if isinstance(error, TimeoutError):
            self.close()
            return self._program.timeout(
                f"{self._program.name} did not answer within {time_limit_s:g} seconds and "
                f"was killed. To avoid this, {self._program.remedy}"
            )
        problem = _INVALID.format(type(error).__name__)
        if isinstance(error, EOFError | OSError):
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=5)
            problem = f"died (exit code {self._child.returncode}). Its output is above"
        elif isinstance(error, OverflowError):
            problem = f"sent an answer of {error} bytes, more than {self._program.most_bytes}"
        return self._failed(problem)

    def _failed(self, problem: str) -> AlignerError:
        self.close()
        return self._program.error(f"the process of {self._program.name} {problem}")

    def _refusal(self, payload: tuple[str, str]) -> AlignerError:
        name, text = payload
        return (error_class(name) or self._program.error)(text)

    def _pickled(self, message: Any) -> bytes:
        try:
            return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a user's class may raise any exception
            raise DataError(
                f"{self._program.name} receives an object that cannot be pickled: "
                f"{text_of(error)}. Use numbers, text, lists, mappings, or functions and objects "
                "of classes that are defined at the top level of a file"
            ) from error


class ProcessPool:
    """Child processes of one program, by slot number. They answer many messages."""

    def __init__(self, program: Program) -> None:
        """Start the process of slot 0. Raises an error of ``load``."""
        self._program = program
        self._processes = {0: ChildProcess(program)}
        self.loaded = self._processes[0].wait_until_ready()  # payload of ``ready``

    def start(self, slots: Sequence[int]) -> dict[int, AlignerError]:
        """Start missing processes of ``slots``. Return the errors of failed processes by slot."""
        processes = self._processes
        missing = [slot for slot in slots if slot not in processes or not processes[slot].alive]
        for slot in missing:
            processes[slot] = ChildProcess(self._program)
        failures: dict[int, AlignerError] = {}
        for slot in missing:
            try:
                processes[slot].wait_until_ready()
            except self._program.error as error:
                failures[slot] = error
        return failures

    def kill(self, slot: int) -> None:
        """Kill the process of ``slot`` and its descendants. `start` can start it again."""
        self._processes[slot].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes and their descendants."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def pid(self, slot: int) -> int:
        """Return the process id of the process in ``slot``."""
        return self._processes[slot].pid


def _parse_answer(message: bytearray) -> tuple[int, str, Any]:
    """Return (message id, kind, payload) of an answer. Raises an error if it is invalid."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    if sum(message.count(mark) for mark in b",[{") > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    message_id, kind, payload = plain(json.loads(message, parse_constant=refuse_constant))
    if type(message_id) is not int or type(kind) is not str:
        raise TypeError(f"{message_id!r}, {kind!r}")
    return message_id, kind, payload


class Channel:
    """The child's end of the connection to the parent."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = _Pipe(socket.socket(fileno=descriptor))
        self._pid = os.getpid()

    def receive(self) -> Any:
        """Wait for the parent's next message. Raises EOFError if the parent closed the socket."""
        return pickle.loads(self._pipe.receive())

    def send(self, message_id: int, kind: str, payload: Any) -> None:
        """Send an answer to a message. `plain` converts ``payload`` to JSON types."""
        if os.getpid() != self._pid:  # user code has forked, and both processes came here
            os._exit(0)
        self._pipe.send(json.dumps(plain([message_id, kind, payload])).encode())

    def refuse(self, message_id: int, error: AlignerError) -> None:
        """Send an error as answer to a message: the name of its class, and its text."""
        self.send(message_id, "refused", (type(error).__name__, text_of(error)))


def serve(descriptor: int, load: Callable[..., tuple[Any, Callable[..., Answers]]]) -> None:
    """Main function of the child: answer messages until the parent closes the socket or dies.

    ``descriptor``: file descriptor of the socket. ``load``: returns a payload, which is sent as
    first answer ("ready"), and a function ``answers``. ``answers(*message)`` yields (kind, payload)
    for each answer to a message. If either function raises an `AlignerError`, the error is sent to
    the parent, which raises it.
    """
    # Let no descendant outlive the parent. If memory is exhausted, the kernel kills this process
    # before others.
    process_tree.adopt_orphans()
    process_tree.die_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Load the user's code. RLIMIT_DATA does not count shared memory and mapped files.
    channel = Channel(descriptor)
    try:
        memory_mb, *load_arguments = channel.receive()
        if memory_mb is not None:
            limit = memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        loaded, answers = load(*load_arguments)
    except AlignerError as error:
        channel.refuse(0, error)
        return
    channel.send(0, "ready", loaded)

    # Answer messages. The parent kills this process at the time limit. If the parent is dead and
    # the user code blocks all Python threads, a C thread of faulthandler ends this process.
    while True:
        try:
            message_id, *message, limit_s = channel.receive()
        except (EOFError, ConnectionResetError):
            return
        faulthandler.dump_traceback_later(limit_s + 5, exit=True)
        try:
            for kind, payload in answers(*message):
                channel.send(message_id, kind, payload)
        except AlignerError as error:
            channel.refuse(message_id, error)
        finally:
            faulthandler.cancel_dump_traceback_later()


class _Pipe:
    """Messages over a socket. A header before each message contains its length.

    Deadlines are times of ``time.monotonic()``. 0 means not to wait, None no limit. After a
    deadline `TimeoutError` is raised. The next `receive` continues with the received bytes.
    """

    _HEADER = struct.Struct("!4sQ")
    _BEGIN = b"\x93ALN"

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()  # beginning of the next message, with its header

    def send(self, body: bytes, deadline: float | None = None) -> None:
        for part in (self._HEADER.pack(self._BEGIN, len(body)), body):
            self.socket.settimeout(_seconds_to(deadline))
            self.socket.sendall(part)

    def receive(self, most_bytes: int | None = None, deadline: float | None = None) -> bytearray:
        """Return the next message, or bytes without a header, such as printed text.

        Raises `EOFError` if the other end is closed, `OverflowError` for more than ``most_bytes``.
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
        while (missing := count - len(self._received)) > 0:
            self.socket.settimeout(_seconds_to(deadline))
            piece = self.socket.recv(min(missing, 2**20))
            if not piece:
                raise EOFError
            self._received += piece
            if len(piece) < missing and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError


def _seconds_to(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, at least 1 ms, because 0 means non-blocking."""
    return None if deadline is None else max(_SHORTEST_WAIT_S, deadline - time.monotonic())


def _kill(
    child: "subprocess.Popen[bytes]",
    end: socket.socket,
    folder: ScratchFolder,
    owner: int,
    mark: str,
) -> None:
    """Kill a child and its descendants, and remove its folder, if this is process ``owner``."""
    if os.getpid() != owner:
        return
    end.close()
    if child.poll() is None:
        process_tree.kill_tree(child.pid)
    else:  # the child is dead, and its descendants have other parents
        process_tree.kill_marked(mark)
    with suppress(subprocess.TimeoutExpired):
        child.wait(process_tree.LONGEST_KILL_S)
    folder.close()
