"""Streams on the dry device: every use of memory must wait for the uses before it.

A stream, and the host of a process, does one thing after the other. The host launches what streams
do. Work whose end it has seen is over for its next launches, and a stream sees the end of another's
work by waiting for the stream or for an event. Memory that was written on one and is used
on another without such a wait is an error that names both; so is memory that a stream gave up and
takes again while another may still use it. Collectives run on the stream that launches them, as
those do in PyTorch that are not asynchronous.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.errors import DryDeviceError
from aligner_plan.dry.known import Operation
from aligner_plan.dry.record import is_kernel

_aten = torch.ops.aten
_COPIES = {_aten._to_copy, _aten.copy_}  # that may cross between host and device


class Lane:
    """A stream, or the host of a process, whose operations are in order."""

    def __init__(self, name: str, process: "Process") -> None:
        self.name, self.process = name, process
        self.steps = 0  # number of the last thing that it does
        self._seen: Moment = {}  # number of the last thing of others that is over before the next

    def moment(self) -> "Moment":
        """All that is over when its present operation is over."""
        return {**self._seen, self: self.steps}

    def wait_for(self, moment: "Moment") -> None:
        """Start the lane's next operation after this moment."""
        for lane, step in moment.items():
            if lane is not self and step > self._seen.get(lane, 0):
                self._seen[lane] = step

    def knows(self, use: "Use") -> bool:
        """Return whether a use of memory is over before its next operation."""
        return use.lane is self or self._seen.get(use.lane, 0) >= use.step

    def act(self, what: str) -> "Use":
        """Do one thing more."""
        self.steps += 1
        return Use(self, self.steps, what)

    def __str__(self) -> str:
        return f"{self.name} of {self.process.name}" if self.process.name else self.name


Moment = dict[Lane, int]


class Use(NamedTuple):
    """One thing that a lane does with memory."""

    lane: Lane
    step: int
    what: str  # name of the operation


class Process:
    """A host with its streams, of which the first is the default one."""

    def __init__(self, name: str) -> None:
        self.name = name  # empty: there is no other
        self.host = Lane("the host", self)
        self.default = Lane("the default stream", self)
        self.streams = [self.default]

    def stream(self) -> Lane:
        """A stream more."""
        self.streams.append(Lane(f"stream {len(self.streams)}", self))
        return self.streams[-1]


@dataclass
class _Memory:
    """Uses of a storage: the last write, and the reads since."""

    order: "Order"
    owner: Lane  # in whose order its memory is freed and taken again
    written: Use | None = None
    read: dict[Lane, Use] = field(default_factory=dict)
    shared: set[Lane] = field(default_factory=set)  # `Tensor.record_stream`
    pinned: bool = False
    is_watched: bool = False  # for being freed


class Order:
    """Order of the operations of a device's streams and hosts."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._first = Process("")
        # What may still use memory that its owner may take again.
        self._freed: list[tuple[Lane, Use]] = []
        self._locked: list[range] = []

    # Where the code that runs now is ------------------------------------------------------------

    @property
    def process(self) -> Process:
        """Process of this thread."""
        return getattr(self._local, "process", self._first)

    @property
    def stream(self) -> Lane:
        """Stream on which this thread launches."""
        return getattr(self._local, "stream", None) or self.process.default

    @contextlib.contextmanager
    def on_stream(self, stream: Lane | None) -> Iterator[None]:
        """Launch on ``stream``; None: no other than before."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def in_process(self, process: Process) -> Iterator[None]:
        """Run the block in another process, which is called and answers.

        Each of the two hosts then knows what the other has seen the end of.
        """
        caller = self.process
        process.host.wait_for(caller.host.moment())
        try:
            with self.of_process(process):
                yield
        finally:
            caller.host.wait_for(process.host.moment())

    @contextlib.contextmanager
    def of_process(self, process: Process) -> Iterator[None]:
        """This thread is one of another process."""
        before = vars(self._local).copy()
        self._local.process, self._local.stream = process, None
        try:
            yield
        finally:
            vars(self._local).clear()
            vars(self._local).update(before)

    # What they do -------------------------------------------------------------------------------

    def saw(self, operation: Operation) -> bool:
        """An operation, where its tensors are; whether the host waits for its end.

        Raises as `launch` does.
        """
        func, args, kwargs, _, operands, outputs = operation
        for tensor in outputs:
            memory = self._memory(tensor)
            memory.pinned |= kwargs.get("pin_memory") is True
        if not is_kernel(func):
            return False
        name, written = operation.name, operation.written()
        writes = [*written, *(each for each in outputs if not _among(each, written))]
        reads = [each for each in operands if not _among(each, written)]
        on_host = [each for each in (*reads, *writes) if not each.is_cuda]
        if len(on_host) == len(reads) + len(writes):
            self.on_host(name, reads, writes)
            return False
        if on_host and func.overloadpacket in _COPIES:
            return self._copy(name, reads, writes, _is_non_blocking(args, kwargs))
        self.on_host(name, on_host)  # single numbers, read when it is launched
        self.launch(name, [each for each in reads if each.is_cuda], writes)
        return False

    def _copy(
        self, name: str, reads: list[Tensor], writes: list[Tensor], non_blocking: bool
    ) -> bool:
        """A copy between host and device; whether the host waits for its end."""
        source, target = reads[-1], writes[0]
        to_host = not target.is_cuda
        if to_host and name == "_to_copy":
            self._memory(target).pinned |= non_blocking
        beside = non_blocking and self._memory(target if to_host else source).pinned
        if non_blocking and not beside and not to_host:  # through memory of the driver's
            self.on_host(name, [source])
            self.launch(name, [], writes)
            return False
        self.launch(name, reads, writes)
        if not beside:
            self.host_waits(self.stream.moment())
        return not beside

    def launch(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operation on this thread's stream, which reads and writes tensors of any shape.

        Raises:
            DryDeviceError: memory is used on another stream, or by the host, beside this.
        """
        stream = self.stream
        stream.wait_for(self.process.host.moment())
        self._use(stream.act(what), reads, writes)

    def on_host(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor] = ()) -> None:
        """An operation of this thread's host on tensors of any shape; raises as `launch`."""
        self._use(self.process.host.act(what), reads, writes)

    def is_idle_at(self, moment: Moment) -> bool:
        """Return whether the streams of this thread's process have nothing to do after it."""
        return all(moment.get(stream, 0) >= stream.steps for stream in self.process.streams)

    def host_waits(self, moment: Moment | None = None) -> None:
        """The host waits for a moment; default all streams of its process."""
        moments = [moment] if moment is not None else [s.moment() for s in self.process.streams]
        for each in moments:
            self.process.host.wait_for(each)

    def _use(self, use: Use, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        for tensor in reads:
            memory = self._memory(tensor)
            _refuse_beside(use, "reads", memory.written, "writes", tensor)
            memory.read[use.lane] = use
            self._watch(memory, tensor, use.lane)
        for tensor in writes:
            memory = self._memory(tensor)
            _refuse_beside(use, "writes", memory.written, "writes", tensor)
            for read in memory.read.values():
                _refuse_beside(use, "writes", read, "reads", tensor)
            memory.written, memory.read = use, {}
            self._watch(memory, tensor, use.lane)

    # Memory -------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Lock the host memory of this tensor (any shape): copies may run beside the host."""
        self._memory(tensor).pinned = True

    def lock(self, addresses: range) -> None:
        """The host's memory there is locked from now on."""
        self._locked.append(addresses)

    def unlock(self, address: int) -> None:
        """The host's memory that begins there is no longer locked."""
        self._locked = [each for each in self._locked if each.start != address]

    def is_locked(self, address: int) -> bool:
        """Return whether the host's memory there is locked."""
        return any(address in each for each in self._locked)

    def record_stream(self, tensor: Tensor, stream: Lane) -> None:
        """Keep the tensor's memory (any shape) until the present work of ``stream`` is done."""
        self._memory(tensor).shared.add(stream)

    def freed(self, storage: torch.UntypedStorage) -> None:
        """The memory of a storage that lives on was freed."""
        memory = vars(storage).pop("_dry_uses", None)
        if memory is not None and memory.is_watched:
            self._note_freed(memory)

    def _memory(self, tensor: Tensor) -> _Memory:
        storage: Any = tensor.untyped_storage()
        memory = vars(storage).get("_dry_uses")
        if memory is None or memory.order is not self:
            on_device = tensor.device.type != "cpu"
            memory = _Memory(self, self.stream if on_device else self.process.host)
            storage._dry_uses = memory
            if on_device and self._freed:
                self._take_freed(memory.owner)
        return memory

    def _watch(self, memory: _Memory, tensor: Tensor, lane: Lane) -> None:
        """Look at memory when it is freed that other streams than its own have used."""
        on_device = tensor.device.type != "cpu"
        if on_device and lane is not memory.owner and not memory.is_watched:
            memory.is_watched = True
            weakref.finalize(tensor.untyped_storage(), self._note_freed, memory)

    def _note_freed(self, memory: _Memory) -> None:
        """Return memory to its owner, which may take it again while others still use it."""
        for use in (memory.written, *memory.read.values()):
            if use is not None and use.lane not in memory.shared:
                self._freed.append((memory.owner, use))
        memory.is_watched, memory.written, memory.read = False, None, {}

    def _take_freed(self, owner: Lane) -> None:
        """A stream takes memory, which may be what it gave up before."""
        freed, self._freed = self._freed, [each for each in self._freed if each[0] is not owner]
        for lane, use in freed:
            if lane is owner and not (owner.knows(use) or owner.process.host.knows(use)):
                raise DryDeviceError(
                    f"memory of {owner} was freed and is taken again while {use.what} on "
                    f"{use.lane} may still use it; let the stream or the host wait before, or "
                    "call record_stream"
                )


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is each for each in others)


def _is_non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _refuse_beside(use: Use, doing: str, other: Use | None, did: str, tensor: Tensor) -> None:
    if other is None or use.lane.knows(other):
        return
    raise DryDeviceError(
        f"{use.what} on {use.lane} {doing} a {list(tensor.shape)} {tensor.dtype} tensor that "
        f"{other.what} on {other.lane} {did}, and nothing has waited for that"
    )


# What torch.cuda offers ---------------------------------------------------------------------------


def stream_classes(order: Order, waited: Callable[[], None]) -> tuple[type, type]:
    """The classes that stand for `torch.cuda.Stream` and `torch.cuda.Event`.

    ``waited``: called when the host waits until the device has nothing left to do.
    """
    event_class = _event_class(order, waited)
    return _stream_class(order, event_class), event_class


def _event_class(order: Order, waited: Callable[[], None]) -> type:
    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._moment: Moment = {}

        def record(self, stream: Any = None) -> None:
            lane = order.stream if stream is None else stream.lane
            lane.wait_for(order.process.host.moment())
            self._moment = lane.moment()

        def wait(self, stream: Any = None) -> None:
            (order.stream if stream is None else stream.lane).wait_for(self._moment)

        def synchronize(self) -> None:
            if order.is_idle_at(self._moment):
                waited()
            order.host_waits(self._moment)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            del end
            return 1.0

    return Event


def _stream_class(order: Order, event_class: type) -> type:
    class Stream:
        cuda_stream = 0

        def __init__(self, *_: Any, lane: Lane | None = None, **__: Any) -> None:
            self.lane = lane or order.process.stream()
            self._entered: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            other.lane.wait_for(order.process.host.moment())
            self.lane.wait_for(other.lane.moment())

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or event_class()
            event.record(self)
            return event

        def synchronize(self) -> None:
            self.record_event().synchronize()

        def query(self) -> bool:
            return True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.lane is self.lane

        def __hash__(self) -> int:
            return hash(self.lane)

        def __enter__(self) -> "Stream":
            self._entered.append(order.on_stream(self.lane))
            self._entered[-1].__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._entered.pop().__exit__(*error)

    return Stream
