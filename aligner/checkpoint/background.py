"""Work beside training: threads that write, and the host memory that they write from.

No thread here takes part in a collective: those are ordered by the threads that train.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import AlignerError

_ALIGNMENT = 64  # bytes; of any dtype, and of the processor's cache
_TOUCHED = 16 << 20  # bytes between two looks whether to stop
_LEAVING_S = 2.0  # for a thread that is to stop in the middle of a file


class AbandonedError(AlignerError):
    """Work that was cancelled before it was done."""


class BackgroundTask:
    """One call in a thread of its own; an interpreter that ends waits for it.

    Args:
        work: given an event that is set when it is to stop before it is done; then it raises
            `AbandonedError`.
        name: of the thread.
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
    def done(self) -> bool:
        """True if the call has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the call, ``seconds`` at the longest; whether it is over."""
        self._thread.join(seconds)
        return self.done

    def stop(self, seconds: float | None = None) -> bool:
        """Cancel the call, and wait until it has stopped."""
        self._stop.set()
        return self.wait(seconds)


_tasks: "weakref.WeakSet[BackgroundTask]" = weakref.WeakSet()


def stop_all_tasks() -> None:
    """Cancel every task of this process, which is about to end."""
    running = [task for task in _tasks if not task.done]
    for task in running:
        task._stop.set()
    for task in running:
        task.wait(_LEAVING_S)


class CopyMemory:
    """Host memory that copies of tensors are put into, one set of copies at a time.

    It is allocated once, in the size that is needed, and kept; beside a GPU its pages are locked,
    so that copies come at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._used = 0
        self._copies: list[weakref.ref[Tensor]] = []

    @property
    def size(self) -> int:
        """Bytes taken."""
        return 0 if self._memory is None else len(self._memory)

    def clear(self, needed: int) -> None:
        """Make room for ``needed`` bytes in all; what was there is given up."""
        self._used = 0
        if needed > self.size:
            self._memory = None  # two at a time may be too much
            self._memory = accelerator.copy_memory(needed)

    def touch(self, stop: threading.Event) -> None:
        """Write to every page that is taken: a system gives them when they are first written to.

        Other threads run meanwhile.

        Raises:
            AbandonedError: ``stop`` was set before.
        """
        if self._memory is None:
            return
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        for start in range(0, self.size, _TOUCHED):
            if stop.is_set():
                raise AbandonedError("memory for copies is no longer needed")
            ctypes.memset(address + start, 0, min(_TOUCHED, self.size - start))

    def take(self, count: int) -> Tensor:
        """uint8 ``[count]``, a storage of its own."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        assert self._memory is not None
        start, self._used = self._used, self._used + aligned(count)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=start)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies of tensors of any shape and dtype; they may still be under way.

        Copies that were made before and are still referred to keep their memory to themselves.
        """
        if not tensors:
            return []
        if any(copy() is not None for copy in self._copies):
            self._memory = None
        self.clear(sum(aligned(each.nbytes) for each in tensors))
        copies = [self.take(each.nbytes).view(each.dtype).view(each.shape) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        self._copies = [weakref.ref(copy) for copy in copies]
        return copies


def aligned(count: int) -> int:
    """Bytes that `CopyMemory.take` uses up for ``count``."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
