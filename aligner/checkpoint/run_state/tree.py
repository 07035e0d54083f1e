"""Trees of tensors and plain values, of which a run state consists.

A tree is a mapping, list or tuple of trees, a tensor, or a plain value (``None``, bool, int,
float, str, bytes, ``torch.dtype``). Such a tree can be read back without executing a pickle.
"""

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aligner.checkpoint.background import CopyMemory, aligned
from aligner.checkpoint.durable import durable_file
from aligner.device import accelerator
from aligner.errors import CheckpointError, DamagedStateError, raised_as

_TENSOR_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_FILE_OVERHEAD = 64 * 1024  # the archive's own directory; with a generous share per tensor below
_TENSOR_OVERHEAD = 512


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor], where: str = "state") -> Any:
    """A copy of the containers of ``tree`` with ``change`` applied to each tensor (any shape).

    Mappings become dicts and number types that only look like int or float (NumPy's, enums)
    become int or float. Anything that is not a tree is refused, with its place.
    """
    if isinstance(tree, Tensor):
        kind = type(tree)
        if kind not in _TENSOR_TYPES:
            raise CheckpointError(
                f"{where} is a {kind.__qualname__}; save each rank's local tensor"
            )
        if tree.is_meta or tree.layout is not torch.strided:
            raise CheckpointError(f"{where} is a {tree.layout} tensor on {tree.device}: no data")
        return change(tree.detach())
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"{where} has the key {key!r}; keys must be strings or integers"
                )
        return {key: map_tensors(each, change, f"{where}.{key}") for key, each in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(v, change, f"{where}[{i}]") for i, v in enumerate(tree))
    return _plain(tree, where)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, bytes, torch.dtype)):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be part "
        "of a run state; convert it to tensors, numbers, strings, lists and mappings"
    )


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_of(value)


def is_json(tree: Any) -> bool:
    """Return whether JSON restores exactly this tree: no tensors, tuples, int keys, NaN, bytes."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and is_json(v) for k, v in tree.items())
    if isinstance(tree, list):
        return all(is_json(value) for value in tree)
    if isinstance(tree, float):
        return math.isfinite(tree)
    return tree is None or isinstance(tree, (bool, int, str))


def normalise(tree: Any, where: str = "state") -> Any:
    """The tree ready to be written: plain containers, no storage written for the sake of a slice.

    A file holds whole storages. Tensors that together cover their storage (weights that are views
    of one buffer, tied weights) are left as they are and written once, without a copy; a tensor
    that is a part of a larger storage, the rest of which is not in the tree, is copied out.
    """
    tree = map_tensors(tree, lambda tensor: tensor, where)
    is_whole = _covering(tree)
    return map_tensors(tree, lambda tensor: tensor if is_whole(tensor) else tensor.clone(), where)


def copied(tree: Any, memory: CopyMemory) -> Any:
    """A copy of a tree in host memory: what `normalise` makes of it, and nothing changes any more.

    ``memory`` has been cleared for `bytes_to_copy`; what it held before is gone.
    """
    is_whole = _covering(tree)
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if not is_whole(tensor):
            tensor = tensor.contiguous()
            target = memory.take(tensor.numel() * tensor.element_size())
            _copy_bytes(tensor.view(-1).view(torch.uint8), target)
            return target.view(tensor.dtype).view(tensor.shape)
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = target = memory.take(storage.nbytes())
            _copy_bytes(storage_bytes(storage, tensor.device), target)
        return torch.empty(0, dtype=tensor.dtype).set_(
            copies[storage._cdata].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    result = map_tensors(tree, copy)
    accelerator.synchronize()
    return result


def _copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy uint8 ``[n]`` to host memory, from a device once `accelerator.synchronize` returns."""
    if source.is_cpu:
        copy_on_host(source, target)
    else:
        target.copy_(source, non_blocking=True)


def copy_on_host(source: Tensor, target: Tensor) -> None:
    """Copy uint8 ``[n]`` within host memory, in this thread only.

    torch's copy synchronises its threads for each tensor, and where cores are busy, with a writer
    for example, that costs more than it gains. NumPy would not do: a tensor that was viewed as an
    array cannot be resized in place any more, as offloading does.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def bytes_to_copy(tree: Any) -> int:
    """Host memory that `copied` puts a tree into."""
    is_whole = _covering(tree)
    whole = {}
    parts = 0
    for tensor in tensors_of(tree):
        if is_whole(tensor):
            whole[_storage_id(tensor)] = aligned(tensor.untyped_storage().nbytes())
        else:
            parts += aligned(tensor.numel() * tensor.element_size())
    return sum(whole.values()) + parts


def storage_bytes(storage: torch.UntypedStorage, device: torch.device | None = None) -> Tensor:
    """All of a storage as uint8 ``[bytes]``.

    ``device``: its tensors'; default the storage's own, which a fake tensor's does not have.
    """
    return torch.empty(0, dtype=torch.uint8, device=device or storage.device).set_(storage)


def _covering(tree: Any) -> Callable[[Tensor], bool]:
    """Return whether the tensors of the tree cover a tensor's storage, so that all is needed."""
    needed: dict[int, dict[tuple[int, int], int]] = {}
    for tensor in tensors_of(tree):
        spans = needed.setdefault(_storage_id(tensor), {})
        span = tensor.numel() * tensor.element_size()
        spans[tensor.data_ptr(), span] = span
    used = {storage: sum(spans.values()) for storage, spans in needed.items()}

    def is_whole(tensor: Tensor) -> bool:
        return used[_storage_id(tensor)] >= tensor.untyped_storage().nbytes()

    return is_whole


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def estimate_bytes(tree: Any) -> int:
    """Upper estimate of the file a normalised tree makes; each storage counts once."""
    storages = {_storage_id(t): t.untyped_storage().nbytes() for t in tensors_of(tree)}
    return sum(storages.values()) + _TENSOR_OVERHEAD * len(storages) + _FILE_OVERHEAD


def write_tree(path: Path, tree: Any, stop: threading.Event | None = None) -> int:
    """Write a normalised tree durably, straight from the tensors' memory; its file's CRC-32.

    ``stop``: once it is set, `AbandonedError` is raised in the middle.
    """
    with _no_archive_checksums(), durable_file(path, estimate_bytes(tree), stop) as file:
        torch.save(tree, file)
    assert file.checksum is not None, "torch.save writes from the beginning to the end"
    return file.checksum


_crc_lock = threading.Lock()
_crc_options: list[bool] = []  # as each of the threads that write has found it


@contextlib.contextmanager
def _no_archive_checksums() -> Iterator[None]:
    """Turn off the archive's own checksums: they cost as much time as the disk and are never read.

    torch has this option once for all threads: the first that comes sets it, the last that goes
    sets it back.
    """
    with _crc_lock:
        _crc_options.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc_lock:
            before = _crc_options[0]
            _crc_options.pop()
            if not _crc_options:
                torch.serialization.set_crc32_options(before)


def read_tree(path: Path) -> Any:
    """Read what `write_tree` wrote, on the CPU, memory-mapped, executing nothing."""
    with raised_as(DamagedStateError, f"{path} cannot be read as tensors"):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
