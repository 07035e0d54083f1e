"""Transfer of tensors between processes of a machine, in shared memory or GPU memory.

::

    sender ─ copy ─► shared memory (memfd_create) ◄─ map /proc/<pid>/fd/<fd> ─ reader
           ─ handle (pid, fd, names, shapes), through the driver ───────────►

Shared memory, called a segment, is freed by the system even if the processes are killed. A reader's
mapping stays valid while one of its tensors is alive. On GPUs the reader opens the sender's memory
with CUDA IPC instead.
"""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError, raised_as

_ALIGNMENT = 64  # bytes of a cache line


class SegmentHandle(NamedTuple):
    """Picklable handle with which another process maps a segment."""

    pid: int
    fd: int
    size: int  # bytes
    entries: list[tuple[str, torch.dtype, tuple[int, ...], int]]  # name, dtype, shape, first byte


class Offer:
    """Group of tensors that this process offers to others on its machine, or on its GPU."""

    handle: Any  # picklable, for `accept`

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
        """Copy ``tensors`` (name and tensor [...]) to shared memory, or on a GPU clone them.

        ``max_bytes``: size of the shared memory, at least the sum of their `aligned_bytes`.
        Only pages that are written use memory.
        """
        self._fd, self._tensors = -1, list[Tensor]()
        if accelerator.has_gpu():
            self.handle = []
            for name, tensor in tensors:
                # Clone, because CUDA IPC exports the whole allocation, which may be a buffer of
                # all parameters.
                self._tensors.append(tensor.clone())
                self.handle.append((name, accelerator.export_tensor(self._tensors[-1])))
            accelerator.synchronize()
            return
        self._fd = os.memfd_create("aligner-weights", os.MFD_CLOEXEC)
        try:
            self.handle = self._write(tensors, max_bytes)
        except BaseException:
            self.close()
            raise

    def _write(self, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> SegmentHandle:
        handle, start = SegmentHandle(os.getpid(), self._fd, max(1, max_bytes), []), 0
        os.ftruncate(self._fd, handle.size)
        memory = _mapped(handle, is_shared=True)
        for name, tensor in tensors:
            end = start + tensor.nbytes
            if end > max_bytes:
                raise WorkerError(f"weights of {end} bytes exceed a segment of {max_bytes} bytes")
            memory[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            handle.entries.append((name, tensor.dtype, tuple(tensor.shape), start))
            start += aligned_bytes(tensor.nbytes)
        return handle

    def close(self) -> None:
        """Free the tensors. On CPU, tensors that other processes have opened stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._tensors.clear()


def aligned_bytes(size: int) -> int:
    """Return the number of bytes that a tensor of ``size`` bytes uses in a segment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mapped(handle: SegmentHandle, *, is_shared: bool) -> Tensor:
    """Map a segment as uint8 [size]. Without ``is_shared``, writing changes a private copy."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    return torch.from_file(path, is_shared, handle.size, dtype=torch.uint8)


def accept(handles: dict[str, Any], refit_key: str = "refit") -> list[tuple[str, Tensor]]:
    """Open the tensors that a process on this machine (with a GPU: on this GPU) offers.

    ``handles``: `accelerator.sharing_key` → `Offer.handle`. ``refit_key``: configuration key of the
    engine's ``refit``, for messages. Returns name and tensor. Writing to a tensor of a segment
    changes a private copy. Raises `WorkerError` if no process offers tensors here, or it died.
    """
    key = accelerator.sharing_key()
    if key not in handles:
        raise WorkerError(
            f"no policy worker shares {key} with this engine (they are on {sorted(handles)}). Set "
            f"{refit_key}=separate"
        )
    handle = handles[key]
    if not isinstance(handle, SegmentHandle):
        return [(name, accelerator.import_tensor(exported)) for name, exported in handle]
    text = f"cannot map the weights that process {handle.pid} offers"
    remedy = f"the process died, or runs on another machine: set {refit_key}=separate"
    with raised_as(WorkerError, text, RuntimeError, remedy=remedy):
        memory = _mapped(handle, is_shared=False)
    weights = []
    for name, dtype, shape, start in handle.entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        weights.append((name, memory[start : start + size].view(dtype).view(shape)))
    return weights
