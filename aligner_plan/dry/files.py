"""Files on the dry device: what is written has the size and, where they are known, the values.

Unknown values are written as zeros. What is read is on the host and real.
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

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap names from 3.13 on


def file_calls(device: Any, mode: FakeTensorMode) -> Iterator[tuple[Any, str, Any]]:
    """Replacements of torch's functions that save, load and wrap tensors of any shape."""
    save, load, memory = torch.save, torch.load, torch.frombuffer
    set_rng_state = torch.set_rng_state

    def real(tree: Any) -> Any:
        made: dict[int, torch.UntypedStorage] = {}
        return tree_map(lambda each: _real(each, device, made), tree)

    def saved(tree: Any, *args: Any, **kwargs: Any) -> None:
        save(real(tree), *args, **kwargs)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return load(*args, **kwargs)

    def of_memory(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            there = memory(*args, **kwargs)
        tensor = mode.from_tensor(there)
        device.known.set(tensor, there)
        storage: Any = tensor.untyped_storage()
        storage._dry_address = there.data_ptr()
        if device.order.is_locked(there.data_ptr()):
            device.order.pin(tensor)
        return tensor

    def set_state(state: Tensor) -> None:
        value = device.known.of(state)
        assert value is not None, "states of generators come from the host"
        set_rng_state(value)

    yield torch, "save", saved
    yield torch, "load", loaded
    yield torch, "frombuffer", of_memory
    yield torch, "set_rng_state", set_state
    # More memory than this machine has: no page of it is taken before it is written to.
    mapped = partial(accelerator.private_memory, extra_flags=_NO_RESERVE)
    yield accelerator, "private_memory", mapped
    # Fake tensors have no memory at their addresses.
    yield (
        state_tree,
        "copy_on_host",
        lambda source, target: np.copyto(target.numpy(), source.numpy()),
    )
    # A run state takes no tensor types that it does not know.
    yield state_tree, "_TENSOR_TYPES", (*state_tree._TENSOR_TYPES, FakeTensor)


def _real(each: Any, device: Any, made: dict[int, torch.UntypedStorage]) -> Any:
    """A tensor of the host, without a fake one's storage but with as many bytes."""
    if not isinstance(each, Tensor):
        return each
    storage = each.untyped_storage()
    is_new = storage._cdata not in made
    if each.is_cuda and is_new:
        device.saw_copy_to_host(each)
    elif is_new:
        device.order.on_host("torch.save", [each])
    value = device.known.of(each)
    with _disable_current_modes():
        if not isinstance(each, FakeTensor):
            return each
        if value is not None:
            return value
        there = made.setdefault(storage._cdata, torch.UntypedStorage(storage.nbytes()).fill_(0))
        empty = torch.empty(0, dtype=each.dtype)
        return empty.set_(there, each.storage_offset(), each.shape, each.stride())


def address(tensor: Tensor) -> int:
    """Stand-in for `Tensor.data_ptr` (any shape): another number for each place of a storage."""
    storage = tensor.untyped_storage()
    first: int = vars(storage).get("_dry_address", storage._cdata)
    return first + tensor.storage_offset() * tensor.element_size()
