"""Files on the dry device: saved tensors have the right size and, if known, the right values.

Unknown values are saved as zeros. Loaded tensors are real tensors on the host.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from aligner.checkpoint.run_state import tree as state_tree
from aligner.device import accelerator

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap defines from 3.13 on


def file_calls(device: Any, mode: FakeTensorMode) -> Iterator[tuple[Any, str, Any]]:
    """Replace torch's functions that save, load and wrap tensors of any shape."""
    torch_save, torch_load, torch_frombuffer = torch.save, torch.load, torch.frombuffer
    torch_set_rng_state = torch.set_rng_state

    def save(tree: Any, *args: Any, **kwargs: Any) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        torch_save(tree_map(lambda leaf: _real(leaf, device, storages), tree), *args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return torch_load(*args, **kwargs)

    def frombuffer(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            value = torch_frombuffer(*args, **kwargs)
        tensor = mode.from_tensor(value)
        device.known.set(tensor, value)
        storage: Any = tensor.untyped_storage()
        storage._dry_address = value.data_ptr()
        if device.order.is_locked(value.data_ptr()):
            device.order.pin(tensor)
        return tensor

    def set_rng_state(state: Tensor) -> None:
        value = device.known.of(state)
        assert value is not None, "states of generators are values of the host"
        torch_set_rng_state(value)

    yield torch, "save", save
    yield torch, "load", load
    yield torch, "frombuffer", frombuffer
    yield torch, "set_rng_state", set_rng_state
    # More memory than this machine has: no page is allocated before it is written.
    mapped = partial(accelerator.private_memory, extra_flags=_NO_RESERVE)
    yield accelerator, "private_memory", mapped
    real_copy_bytes = state_tree._copy_bytes

    def copy_bytes(source: Tensor, target: Tensor) -> None:
        if source.is_cpu:  # fake tensors have no memory at their addresses
            np.copyto(target.numpy(), source.numpy())
        else:
            real_copy_bytes(source, target)

    yield state_tree, "_copy_bytes", copy_bytes
    # A run state refuses unknown tensor types.
    yield state_tree, "_TENSOR_TYPES", (*state_tree._TENSOR_TYPES, FakeTensor)


def _real(leaf: Any, device: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    """Return a real tensor for a fake one: its value, or zeros in a storage of the same size."""
    if not isinstance(leaf, Tensor):
        return leaf
    storage = leaf.untyped_storage()
    is_new = storage._cdata not in storages
    if leaf.is_cuda and is_new:
        device.saw_copy_to_host(leaf)
    elif is_new:
        device.order.on_host("torch.save", [leaf])
    value = device.known.of(leaf)
    with _disable_current_modes():
        if not isinstance(leaf, FakeTensor):
            return leaf
        if value is not None:
            return value
        zeros = storages.setdefault(storage._cdata, torch.UntypedStorage(storage.nbytes()).fill_(0))
        empty = torch.empty(0, dtype=leaf.dtype)
        return empty.set_(zeros, leaf.storage_offset(), leaf.shape, leaf.stride())


def address(tensor: Tensor) -> int:
    """Substitute for `Tensor.data_ptr` (any shape): unique for each offset of a storage."""
    storage = tensor.untyped_storage()
    first: int = vars(storage).get("_dry_address", storage._cdata)
    return first + tensor.storage_offset() * tensor.element_size()
