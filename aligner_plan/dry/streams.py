"""Streams on the dry device: every use of memory must wait for the earlier uses.

A stream, or the host of a process, runs one operation after the other. Each is a lane here. The
host launches the operations of streams. Work that the host has seen complete is complete for its
later launches. A stream sees the end of another stream's work by waiting for the stream or an
event. Two cases are errors, which name both operations: memory that is written on one lane and used
on another without such a wait, and memory that a stream frees and allocates again while another
lane may still use it. Collectives run on the stream that launches them, as PyTorch's synchronous
collectives do.

    operation ─► reads, writes ─► last write and reads of each storage ─► waited for? ─► new uses
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
_COPIES = {_aten._to_copy, _aten.copy_}  # may cross between host and device


class Lane:
    """A stream, or the host of a process, whose operations are ordered."""

    def __init__(self, name: str, process: "Process") -> None:
        self.name, self.process = name, process
        self.steps = 0  # index of its last operation
        self._seen: Moment = {}  # last operation of each other lane that ends before its next one

    def moment(self) -> "Moment":
        """Return all operations that are complete when its current operation is complete."""
        return {**self._seen, self: self.steps}

    def wait_for(self, moment: "Moment") -> None:
        """Start the lane's next operation after a moment."""
        for lane, step in moment.items():
            if lane is not self and step > self._seen.get(lane, 0):
                self._seen[lane] = step

    def knows(self, use: "Use") -> bool:
        """Return whether a use of memory ends before the lane's next operation."""
        return use.lane is self or self._seen.get(use.lane, 0) >= use.step

    def act(self, operation: str) -> "Use":
        """Begin the next operation."""
        self.steps += 1
        return Use(self, self.steps, operation)

    def __str__(self) -> str:
        return f"{self.name} of {self.process.name}" if self.process.name else self.name


Moment = dict[Lane, int]


class Use(NamedTuple):
    """One use of memory by an operation of a lane."""

    lane: Lane
    step: int
    operation: str


class Process:
    """A host with its streams. The first one is the default stream."""

    def __init__(self, name: str) -> None:
        self.name = name  # empty for a single process
        self.host = Lane("the host", self)
        self.default = Lane("the default stream", self)
        self.streams = [self.default]

    def stream(self) -> Lane:
        """Create a stream."""
        self.streams.append(Lane(f"stream {len(self.streams)}", self))
        return self.streams[-1]


@dataclass
class _Memory:
    """Uses of a storage: the last write, and the reads after it."""

    order: "Order"
    owner: Lane  # the lane that allocates and frees it
    written: Use | None = None
    read: dict[Lane, Use] = field(default_factory=dict)
    shared: set[Lane] = field(default_factory=set)  # by `Tensor.record_stream`
    pinned: bool = False
    is_watched: bool = False  # for being freed


class Order:
    """Order of the operations of a device's streams and hosts."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._first = Process("")
        # Owners of freed memory, with uses of the memory that may not be over.
        self._freed: list[tuple[Lane, Use]] = []
        self._locked: list[range] = []

    # Process and stream of the running code ----------------------------------------------------

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
        """Launch on ``stream`` in the block. None: the current stream."""
        previous = getattr(self._local, "stream", None)
        self._local.stream = stream or previous
        try:
            yield
        finally:
            self._local.stream = previous

    @contextlib.contextmanager
    def in_process(self, process: Process) -> Iterator[None]:
        """Run the block in another process, which is called and returns.

        Each host then knows the operations that the other has seen complete.
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
        """Run the block as a thread of another process."""
        previous = vars(self._local).copy()
        self._local.process, self._local.stream = process, None
        try:
            yield
        finally:
            vars(self._local).clear()
            vars(self._local).update(previous)

    # Operations ---------------------------------------------------------------------------------

    def saw(self, operation: Operation) -> bool:
        """Order an operation on the host or stream of its tensors. Return whether the host waits.

        Raises the errors of `launch`.
        """
        func, args, kwargs, _, operands, outputs = operation
        for tensor in outputs:
            memory = self._memory(tensor)
            memory.pinned |= kwargs.get("pin_memory") is True
        if not is_kernel(func):
            return False
        name, written = operation.name, operation.written()
        writes = [*written, *(tensor for tensor in outputs if not _contains(written, tensor))]
        reads = [tensor for tensor in operands if not _contains(written, tensor)]
        on_host = [tensor for tensor in (*reads, *writes) if not tensor.is_cuda]
        if len(on_host) == len(reads) + len(writes):
            self.on_host(name, reads, writes)
            return False
        if on_host and func.overloadpacket in _COPIES:
            is_non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            return self._copy(name, reads, writes, bool(is_non_blocking))
        self.on_host(name, on_host)  # scalars, which are read at the launch
        self.launch(name, [tensor for tensor in reads if tensor.is_cuda], writes)
        return False

    def _copy(
        self, name: str, reads: list[Tensor], writes: list[Tensor], non_blocking: bool
    ) -> bool:
        """Order a copy between host and device. Return whether the host waits for it."""
        source, target = reads[-1], writes[0]
        to_host = not target.is_cuda
        if to_host and name == "_to_copy":
            self._memory(target).pinned |= non_blocking
        is_async = non_blocking and self._memory(target if to_host else source).pinned
        if non_blocking and not is_async and not to_host:  # through a buffer of the driver
            self.on_host(name, [source])
            self.launch(name, [], writes)
            return False
        self.launch(name, reads, writes)
        if not is_async:
            self.host_waits(self.stream.moment())
        return not is_async

    def launch(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Order an operation on this thread's stream, which uses tensors of any shape.

        Raises:
            DryDeviceError: another stream or the host may use the memory at the same time.
        """
        stream = self.stream
        stream.wait_for(self.process.host.moment())
        self._use(stream.act(operation), reads, writes)

    def on_host(
        self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor] = ()
    ) -> None:
        """Order an operation of this thread's host on tensors of any shape, as `launch`."""
        self._use(self.process.host.act(operation), reads, writes)

    def is_idle_at(self, moment: Moment) -> bool:
        """Return whether the streams of this thread's process have no work after ``moment``."""
        return all(moment.get(stream, 0) >= stream.steps for stream in self.process.streams)

    def host_waits(self, moment: Moment | None = None) -> None:
        """Let the host wait for a moment, by default for all streams of its process."""
        moments = [moment] if moment is not None else [s.moment() for s in self.process.streams]
        for reached in moments:
            self.process.host.wait_for(reached)

    def _use(self, use: Use, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        for tensor in reads:
            memory = self._memory(tensor)
            _check_order(use, "reads", memory.written, "writes", tensor)
            memory.read[use.lane] = use
            self._watch(memory, tensor, use.lane)
        for tensor in writes:
            memory = self._memory(tensor)
            _check_order(use, "writes", memory.written, "writes", tensor)
            for read in memory.read.values():
                _check_order(use, "writes", read, "reads", tensor)
            memory.written, memory.read = use, {}
            self._watch(memory, tensor, use.lane)

    # Memory -------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Lock the host memory of a tensor (any shape), so that copies run asynchronously."""
        self._memory(tensor).pinned = True

    def lock(self, addresses: range) -> None:
        """Lock host memory."""
        self._locked.append(addresses)

    def unlock(self, address: int) -> None:
        """Unlock the host memory that begins at ``address``."""
        self._locked = [addresses for addresses in self._locked if addresses.start != address]

    def is_locked(self, address: int) -> bool:
        """Return whether host memory is locked."""
        return any(address in addresses for addresses in self._locked)

    def record_stream(self, tensor: Tensor, stream: Lane) -> None:
        """Keep the tensor's memory (any shape) until the current work of ``stream`` is complete."""
        self._memory(tensor).shared.add(stream)

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory of a storage was freed, but not the storage."""
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
                self._reuse_freed(memory.owner)
        return memory

    def _watch(self, memory: _Memory, tensor: Tensor, lane: Lane) -> None:
        """Watch for the freeing of memory that other streams than the owner have used."""
        on_device = tensor.device.type != "cpu"
        if on_device and lane is not memory.owner and not memory.is_watched:
            memory.is_watched = True
            weakref.finalize(tensor.untyped_storage(), self._note_freed, memory)

    def _note_freed(self, memory: _Memory) -> None:
        """Return memory to its owner, which may reuse it while other lanes still use it."""
        for use in (memory.written, *memory.read.values()):
            if use is not None and use.lane not in memory.shared:
                self._freed.append((memory.owner, use))
        memory.is_watched, memory.written, memory.read = False, None, {}

    def _reuse_freed(self, owner: Lane) -> None:
        """Check an allocation of a stream, which may reuse any memory that the stream has freed."""
        freed = [use for lane, use in self._freed if lane is owner]
        self._freed = [entry for entry in self._freed if entry[0] is not owner]
        for use in freed:
            if not (owner.knows(use) or owner.process.host.knows(use)):
                raise DryDeviceError(
                    f"memory of {owner} was freed and is allocated again while {use.operation} on "
                    f"{use.lane} may still use it. Let the stream or the host wait first, or call "
                    "record_stream"
                )


def _contains(tensors: list[Tensor], tensor: Tensor) -> bool:
    return any(tensor is item for item in tensors)


def _check_order(
    use: Use, action: str, earlier: Use | None, earlier_action: str, tensor: Tensor
) -> None:
    if earlier is None or use.lane.knows(earlier):
        return
    raise DryDeviceError(
        f"{use.operation} on {use.lane} {action} a {list(tensor.shape)} {tensor.dtype} tensor that "
        f"{earlier.operation} on {earlier.lane} {earlier_action}, and nothing has waited for that"
    )


# Classes of torch.cuda ----------------------------------------------------------------------------


def stream_classes(order: Order, host_waited: Callable[[], None]) -> tuple[type, type]:
    """Create substitutes for `torch.cuda.Stream` and `torch.cuda.Event`.

    ``host_waited``: called when the host waits until the device is idle.
    """
    event_class = _event_class(order, host_waited)
    return _stream_class(order, event_class), event_class


def _event_class(order: Order, host_waited: Callable[[], None]) -> type:
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
                host_waited()
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

        def wait_stream(self, stream: Any) -> None:
            stream.lane.wait_for(order.process.host.moment())
            self.lane.wait_for(stream.lane.moment())

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
