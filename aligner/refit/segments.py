"""Tensors from one process to another on the same machine, without a copy through a socket.

On CPU they are written into a memory segment without a name (``memfd_create``), which the reader
maps through ``/proc/<pid>/fd/<number>``: nothing is left behind when either process is killed. On
GPUs the reader opens the sender's allocation (CUDA IPC).

Consumes: tensors of one process. Waits for: nothing. The sender keeps a segment until it is
closed; what a reader has mapped stays valid as long as one of its tensors lives.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError

_ALIGNMENT = 64  # bytes; so that no tensor begins within a cache line of another


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor in a segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes


@dataclass(frozen=True)
class SegmentHandle:
    """Handle by which a reader maps a segment; picklable."""

    pid: int
    fd: int
    size: int  # bytes
    places: tuple[TensorPlace, ...]


class Segment:
    """Tensors in shared memory; `close` it when the readers have mapped it."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
        """Copy ``tensors``, of any shape and dtype, one after the other.

        Together they have at most ``max_bytes``. Pages are taken as they are written, so a generous
        bound costs nothing.
        """
        self._fd = os.memfd_create("aligner-weights", os.MFD_CLOEXEC)
        try:
            self.handle = self._fill(tensors, max_bytes)
        except BaseException:
            self.close()
            raise

    def _fill(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> SegmentHandle:
        os.ftruncate(self._fd, max(1, max_bytes))
        places: list[TensorPlace] = []
        end = 0
        with mmap.mmap(self._fd, max(1, max_bytes)) as memory:
            for name, tensor in tensors:
                place = TensorPlace(name, tensor.dtype, tuple(tensor.shape), end)
                if end + tensor.nbytes > max_bytes:
                    raise WorkerError(
                        f"weights of {end + tensor.nbytes} bytes for a segment of {max_bytes}"
                    )
                view = _view(memory, place)
                view.copy_(tensor)
                del view  # the map cannot close while a tensor looks into it
                places.append(place)
                end += aligned_bytes(tensor.nbytes)
        return SegmentHandle(os.getpid(), self._fd, max(1, max_bytes), tuple(places))

    def close(self) -> None:
        """Give the sender's hold up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def aligned_bytes(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes takes in a segment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def open_segment(handle: SegmentHandle) -> list[tuple[str, Tensor]]:
    """Map another process's segment; the tensors share its memory, and writes stay private."""
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
            "died, or runs on another machine: set generation.vllm.refit=separate"
        ) from error
    return [(place.name, _view(memory, place)) for place in handle.places]


def _view(memory: mmap.mmap, place: TensorPlace) -> Tensor:
    count = 1
    for size in place.shape:
        count *= size
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.view(place.shape)


class Offer:
    """A group of tensors that this process offers to others on its machine or device."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
        """On CPU copy ``tensors`` (any shape and dtype) into a segment, on a GPU hold them."""
        self._segment: Segment | None = None
        self._held: list[Tensor] = []
        self.handle: Any
        if accelerator.has_gpu():
            exported = []
            for name, tensor in tensors:
                # Also a parameter is copied: its allocation is the whole gradient buffer's.
                self._held.append(tensor.clone())
                exported.append((name, accelerator.export_tensor(self._held[-1])))
            accelerator.synchronize()
            self.handle = exported
        else:
            self._segment = Segment(tensors, max_bytes)
            self.handle = self._segment.handle

    def close(self) -> None:
        """Withdraw it; what has been mapped on CPU stays valid, on a GPU it does not."""
        if self._segment is not None:
            self._segment.close()
        self._held.clear()


def accept(handles: dict[str, Any]) -> Sequence[tuple[str, Tensor]]:
    """The tensors offered under this process's `accelerator.sharing_key`."""
    key = accelerator.sharing_key()
    if key not in handles:
        raise WorkerError(
            f"no policy worker shares {key} with this engine (they are on {sorted(handles)}); set "
            "generation.vllm.refit=separate"
        )
    handle = handles[key]
    if isinstance(handle, SegmentHandle):
        return open_segment(handle)
    return [(name, accelerator.import_tensor(exported)) for name, exported in handle]
