"""Threads that write files while training continues, and host memory for copies of tensors."""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import AlignerError

_ALIGNMENT = 64  # bytes: enough for any dtype, and a cache line of the processor
_TOUCHED = 16 << 20  # bytes between two checks of the stop event
_LEAVING_S = 2.0  # time for a thread to stop in the middle of a file


class AbandonedError(AlignerError):
    """A background task was cancelled before its end."""


class BackgroundTask:
    """Call of ``work`` in a thread named ``name``. The process does not exit before its end.

    ``work(stop)`` must raise `AbandonedError` soon after the event ``stop`` is set.
    """

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        self._stop = threading.Event()
        self.error: Exception | None = None

        def run() -> None:
            try:
                work(self._stop)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=run, name=name)
        _tasks.add(self)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the call has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the call, at most ``seconds`` if given. Return `is_finished`."""
        self._thread.join(seconds)
        return self.is_finished

    def stop(self, seconds: float | None = None) -> bool:
        """Set the event ``stop`` and wait, see `wait`. Return `is_finished`."""
        self._stop.set()
        return self.wait(seconds)


_tasks: "weakref.WeakSet[BackgroundTask]" = weakref.WeakSet()


def stop_all_tasks() -> None:
    """Cancel every task of this process before the process ends."""
    running = [task for task in _tasks if not task.is_finished]
    for task in running:
        task._stop.set()
    for task in running:
        task.wait(_LEAVING_S)


class CopyMemory:
    """Reusable host memory for copies of tensors. With a GPU, the memory is page-locked."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._used = 0
        self._copies: list[weakref.ref[Tensor]] = []

    @property
    def size(self) -> int:
        """Number of allocated bytes."""
        return 0 if self._memory is None else len(self._memory)

    def clear(self, size: int) -> None:
        """Discard all copies. Enlarge the memory to ``size`` bytes if it is smaller."""
        self._used = 0
        if size > self.size:
            self._memory = None  # both allocations together may not fit
            self._memory = accelerator.copy_memory(size)

    def touch(self, stop: threading.Event) -> None:
        """Write to all pages, so that they are allocated. Raises `AbandonedError` on ``stop``."""
        if self._memory is None:
            return
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        for start in range(0, self.size, _TOUCHED):
            if stop.is_set():
                raise AbandonedError("the allocation of memory for copies was cancelled")
            ctypes.memset(address + start, 0, min(_TOUCHED, self.size - start))

    def take(self, count: int) -> Tensor:
        """Return the next ``count`` unused bytes as a uint8 tensor [count] with its own storage."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        assert self._memory is not None
        start, self._used = self._used, self._used + aligned(count)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=start)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of ``tensors`` [...], valid after `accelerator.synchronize`."""
        if not tensors:
            return []
        if any(copy() is not None for copy in self._copies):
            self._memory = None  # earlier copies are still referenced
        self.clear(sum(aligned(tensor.nbytes) for tensor in tensors))
        copies = [self.take(t.nbytes).view(t.dtype).view(t.shape) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._copies = [weakref.ref(copy) for copy in copies]
        return copies


def aligned(count: int) -> int:
    """Return ``count`` bytes rounded up to the alignment of `CopyMemory.take`."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
