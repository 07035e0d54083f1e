"""Tensors from one process to another on the same machine, without a copy through a socket.

On CPU they are written into a memory segment without a name (``memfd_create``), which the reader
maps through ``/proc/<pid>/fd/<number>``: nothing is left behind when either process is killed. On
GPUs the reader opens the sender's allocation (CUDA IPC).

Consumes: tensors of one process. Waits for: nothing. The sender keeps a segment until it is
closed; what a reader has mapped stays valid as long as one of its tensors lives.
"""

import math
import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError

_ALIGNMENT = 64  # bytes; so that no tensor begins within a cache line of another


class TensorPlace(NamedTuple):
    """Place of a tensor in a segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes

    def view(self, memory: mmap.mmap) -> Tensor:
        """The tensor as a view of the segment's memory."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


class SegmentHandle(NamedTuple):
    """Handle by which a reader maps a segment; picklable."""

    pid: int
    fd: int
    size: int  # bytes
    places: tuple[TensorPlace, ...]


class Offer:
    """A group of tensors that this process offers to others on its machine or device.

    ``handle``: what a reader opens it with, picklable.
    """

    handle: Any

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
        """On CPU copy ``tensors`` (any shape and dtype) into a segment, on a GPU hold them.

        Together they have at most ``max_bytes``. Pages of a segment are taken as they are written,
        so a generous bound costs nothing.
        """
        self._fd, self._held = -1, list[Tensor]()
        if accelerator.has_gpu():
            self.handle = []
            for name, tensor in tensors:
                # Also a parameter is copied: its allocation is the whole gradient buffer's.
                self._held.append(tensor.clone())
                self.handle.append((name, accelerator.export_tensor(self._held[-1])))
            accelerator.synchronize()
            return
        self._fd = os.memfd_create("aligner-weights", os.MFD_CLOEXEC)
        try:
            self.handle = self._write(tensors, max_bytes)
        except BaseException:
            self.close()
            raise

    def _write(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> SegmentHandle:
        """Copy the tensors into the segment, one after the other."""
        size, end = max(1, max_bytes), 0
        places: list[TensorPlace] = []
        os.ftruncate(self._fd, size)
        with mmap.mmap(self._fd, size) as memory:
            for name, tensor in tensors:
                if end + tensor.nbytes > max_bytes:
                    raise WorkerError(
                        f"weights of {end + tensor.nbytes} bytes for a segment of {max_bytes}"
                    )
                place = TensorPlace(name, tensor.dtype, tuple(tensor.shape), end)
                place.view(memory).copy_(tensor)  # no view is kept: the map could not close
                places.append(place)
                end += aligned_bytes(tensor.nbytes)
        return SegmentHandle(os.getpid(), self._fd, size, tuple(places))

    def close(self) -> None:
        """Withdraw it; what has been mapped on CPU stays valid, on a GPU it does not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._held.clear()


def aligned_bytes(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes takes in a segment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def accept(handles: dict[str, Any], refit_key: str = "refit") -> list[tuple[str, Tensor]]:
    """The tensors offered under this process's `accelerator.sharing_key`.

    Those of a segment share its memory, and writes to them stay private. ``refit_key``: dotted key
    of the engine's `refit`, for messages.

    Raises:
        WorkerError: nobody offers them here, or their process died.
    """
    key = accelerator.sharing_key()
    if key not in handles:
        raise WorkerError(
            f"no policy worker shares {key} with this engine (they are on {sorted(handles)}); set "
            f"{refit_key}=separate"
        )
    handle = handles[key]
    if not isinstance(handle, SegmentHandle):
        return [(name, accelerator.import_tensor(exported)) for name, exported in handle]
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(
                file.fileno(),
                handle.size,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,  # torch wants writable memory
            )
    except OSError as error:
        raise WorkerError(
            f"cannot map the weights that process {handle.pid} offers at {path}: {error}; it "
            f"died, or runs on another machine: set {refit_key}=separate"
        ) from error
    return [(place.name, place.view(memory)) for place in handle.places]
