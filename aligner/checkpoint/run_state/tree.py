"""Trees of tensors and plain values, the contents of a run state.

A tree is a mapping, list or tuple of trees, a tensor, or a plain value (``None``, bool, int,
float, str, bytes, ``torch.dtype``). Reading a file of a tree runs no code in it.
"""

import contextlib
import ctypes
import math
import random
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
# Estimated bytes in a file of `torch.save` in addition to the tensors' values.
_FILE_OVERHEAD = 64 * 1024
_TENSOR_OVERHEAD = 512


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor], where: str = "state") -> Any:
    """Return a copy of ``tree`` with ``change`` applied to each tensor [...].

    Mappings become dicts. NumPy's numbers and enums become int, float or str. Raises
    `CheckpointError` for a value that is not a tree. ``where``: name of the tree in the message.
    """
    if isinstance(tree, Tensor):
        kind, is_strided = type(tree), tree.layout is torch.strided
        if kind not in _TENSOR_TYPES or tree.is_meta or not is_strided:
            raise CheckpointError(
                f"{where} is a {tree.layout} {kind.__qualname__} on {tree.device}, which cannot be "
                "saved. Save a dense tensor in memory instead, such as tensor.to_local()"
            )
        return change(tree.detach())
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"{where} has the key {key!r}, but keys must be strings or integers. Convert it"
                )
        return {key: map_tensors(value, change, f"{where}.{key}") for key, value in tree.items()}
    # Subclasses such as named tuples are not trees.
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
        "of a run state. Convert it to tensors, numbers, strings, lists and mappings"
    )


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of a tree in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_of(value)


def is_json(tree: Any) -> bool:
    """Return whether JSON represents the tree exactly: no tensors, tuples, NaN, integer keys."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and is_json(v) for k, v in tree.items())
    if isinstance(tree, list):
        return all(is_json(value) for value in tree)
    if isinstance(tree, float):
        return math.isfinite(tree)
    return tree is None or isinstance(tree, (bool, int, str))


def normalise(tree: Any, where: str = "state") -> Any:
    """Return a tree to save: a tensor is cloned if its storage has elements outside of the tree."""
    tree = map_tensors(tree, lambda tensor: tensor, where)
    is_covered = _covering(tree)
    return map_tensors(tree, lambda tensor: tensor if is_covered(tensor) else tensor.clone(), where)


def copied(tree: Any, memory: CopyMemory) -> Any:
    """Return a copy of ``tree`` whose tensors are in ``memory``, which needs `bytes_to_copy`."""
    is_covered = _covering(tree)
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if not is_covered(tensor):
            tensor = tensor.contiguous()
            target = memory.take(tensor.nbytes)
            _copy_bytes(tensor.view(-1).view(torch.uint8), target)
            return target.view(tensor.dtype).view(tensor.shape)
        # Tensors that share a storage share its copy.
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
    if not source.is_cpu:
        target.copy_(source, non_blocking=True)
        return
    # ``copy_`` would synchronise torch's threads, which is slow if cores are busy. NumPy would keep
    # the tensor from being resized, and offloading resizes tensors.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def bytes_to_copy(tree: Any) -> int:
    """Return the number of bytes of host memory that `copied` uses for a tree."""
    is_covered = _covering(tree)
    storages, parts = {}, []
    for tensor in tensors_of(tree):
        if is_covered(tensor):
            storages[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        else:
            parts.append(tensor.nbytes)
    return sum(map(aligned, [*storages.values(), *parts]))


def storage_bytes(storage: torch.UntypedStorage, device: torch.device | None = None) -> Tensor:
    """Return a view of ``storage`` as uint8 [bytes]. ``device``: its device, for fake tensors."""
    return torch.empty(0, dtype=torch.uint8, device=device or storage.device).set_(storage)


def _covering(tree: Any) -> Callable[[Tensor], bool]:
    """Return a function that tells whether all elements of a tensor's storage are in the tree."""
    spans: dict[int, set[tuple[int, int]]] = {}  # storage → address and bytes of its tensors
    for tensor in tensors_of(tree):
        span = tensor.data_ptr(), tensor.nbytes
        spans.setdefault(storage_id(tensor), set()).add(span)
    covered = {storage: sum(size for _, size in s) for storage, s in spans.items()}

    def is_covered(tensor: Tensor) -> bool:
        return covered[storage_id(tensor)] >= tensor.untyped_storage().nbytes()

    return is_covered


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors [...] with the same storage."""
    return tensor.untyped_storage()._cdata


def estimate_bytes(tree: Any) -> int:
    """Return an upper estimate, in bytes, of the file that `write_tree` writes."""
    storages = {storage_id(t): t.untyped_storage().nbytes() for t in tensors_of(tree)}
    return sum(storages.values()) + _TENSOR_OVERHEAD * len(storages) + _FILE_OVERHEAD


def write_tree(path: Path, tree: Any, stop: threading.Event | None = None) -> int:
    """Write a result of `normalise` to the disk. Returns the CRC-32. ``stop``: cancels writing."""
    with _no_archive_checksums(), durable_file(path, estimate_bytes(tree), stop) as file:
        torch.save(tree, file)
    assert file.checksum is not None, "torch.save writes sequentially"
    return file.checksum


_crc_lock = threading.Lock()
_crc_options: list[bool] = []  # for each writing thread, the option before it began


@contextlib.contextmanager
def _no_archive_checksums() -> Iterator[None]:
    """Let `torch.save` write no checksums in the block, because they are never read."""
    with _crc_lock:
        _crc_options.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc_lock:
            initial = _crc_options[0]
            _crc_options.pop()
            if not _crc_options:
                torch.serialization.set_crc32_options(initial)


def read_tree(path: Path) -> Any:
    """Read a file of `write_tree`. Tensors are on the CPU and memory-mapped. No code runs."""
    with raised_as(DamagedStateError, f"{path} cannot be read as tensors"):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def capture_rng(device_state: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy, torch (CPU) and device.

    ``device_state``: function that returns the state of the device's generator.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "device": device_state(),
    }


def restore_rng(
    state: Mapping[str, Any], set_device_state: Callable[[Any], None] = lambda _: None
) -> None:
    """Restore ``state``, a result of `capture_rng`. ``set_device_state`` gets its device state."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"].clone())
    set_device_state(state["device"])
