"""Values of fake tensors that are computable from values of the host.

Lengths, masks, token ids and indices determine the shapes of the GPU's results. They are therefore
computed on the host in addition to the fake tensors. Values that depend on weights or random
numbers are unknown.
"""

import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_LIMIT = 1 << 20  # elements. Larger values are unknown
_OVERWRITING = {_aten.zero_, _aten.fill_, _aten.copy_}


class Operation(NamedTuple):
    """One operation below autograd, with the tensors [any shape] of its arguments and results."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    operands: list[Tensor]
    results: list[Tensor]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> "Operation":
        """Describe the call ``func(*args, **kwargs)`` with the result ``out``."""
        return cls(func, args, kwargs, out, tensors_in((args, kwargs)), tensors_in(out))

    @property
    def name(self) -> str:
        """Name without overload."""
        return self.func.overloadpacket.__name__

    def written(self) -> list[Tensor]:
        """Return the arguments that the operation writes to."""
        tensors: list[Tensor] = []
        for index, name in _traits(self.func).written:
            _collect(self.args[index] if index < len(self.args) else self.kwargs.get(name), tensors)
        return tensors


class KnownValues:
    """Known values. The value of a view is a view of the value."""

    def __init__(self) -> None:
        # Storages of values whose fake counterparts were overwritten with unknown values.
        self._overwritten: weakref.WeakSet[Any] = weakref.WeakSet()

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor (any shape) on the CPU, or None if it is unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= _LIMIT else None
        value = getattr(tensor, "_known", None)
        if value is None or value.untyped_storage() in self._overwritten:
            return None
        return value

    def set(self, tensor: Any, value: Tensor | None) -> None:
        """Set the value of a fake tensor (any shape), of its dtype. None: unknown."""
        tensor._known = value
        if value is not None and isinstance(tensor, FakeTensor):
            storage, twin = tensor.untyped_storage(), value.untyped_storage()
            if storage.nbytes() == twin.nbytes():
                storage._dry_twin = twin  # for tensors that are created from the storage

    def forget(self, tensor: Tensor) -> None:
        """Mark the values of a tensor (any shape) and of its views as unknown."""
        value = getattr(tensor, "_known", None)
        if value is not None:
            self._overwritten.add(value.untyped_storage())
            self.set(tensor, None)

    def follow(self, operation: Operation) -> None:
        """Repeat an operation of the device on the host, if all of its inputs are known."""
        func, args, kwargs, out, inputs, outputs = operation
        if func.overloadpacket is _aten.set_:
            self._follow_storage(args[1], out)
            return
        traits = _traits(func)
        if traits.overwrites and self.of(args[0]) is None:
            inputs = inputs[1:]  # the overwritten value does not matter
        values: dict[int, Any] = {id(tensor): self.of(tensor) for tensor in inputs}
        is_known = traits.computable and not any(value is None for value in values.values())
        if not is_known or any(tensor.numel() > _LIMIT for tensor in outputs):
            for tensor in operation.written():
                self.forget(tensor)
            return
        with _disable_current_modes():
            if traits.overwrites and id(args[0]) not in values:
                values[id(args[0])] = torch.empty(args[0].shape, dtype=args[0].dtype)
            options = {k: False if k == "pin_memory" else value for k, value in kwargs.items()}
            host_args, host_kwargs = tree_map(lambda leaf: _on_host(leaf, values), (args, options))
            host_out = func(*host_args, **host_kwargs)
        for tensor, value in zip(outputs, tensors_in(host_out), strict=True):
            self.set(tensor, value)

    def _follow_storage(self, storage: Any, out: Tensor) -> None:
        """Set the value of a tensor that was created from a storage."""
        twin = vars(storage).get("_dry_twin")
        if twin is None:
            self.set(out, None)
            return
        with _disable_current_modes():
            empty = torch.empty(0, dtype=out.dtype)
            value = empty.set_(twin, out.storage_offset(), out.shape, out.stride())
        self.set(out, value)


class _Traits(NamedTuple):
    """Traits of an operation that do not depend on its arguments."""

    overwrites: bool  # its first argument, without reading it
    computable: bool  # from its arguments alone
    written: tuple[tuple[int, str], ...]  # index and name of the arguments that it writes to


@cache
def _traits(func: Any) -> _Traits:
    return _Traits(
        func.overloadpacket in _OVERWRITING,
        torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in func.overloadpacket.__name__  # uninitialised
        and func.overloadpacket is not _aten._fused_rms_norm_backward,  # not on the host
        tuple(
            (index, argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def tensors_in(tree: Any) -> list[Tensor]:
    """Collect the tensors in nested sequences and mappings of arguments or results."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    # Called for every operation. PyTorch's `tree_leaves` took a tenth of the total time here.
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, tensors)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, tensors)


def _on_host(leaf: Any, values: dict[int, Any]) -> Any:
    if isinstance(leaf, Tensor):
        return values[id(leaf)]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
