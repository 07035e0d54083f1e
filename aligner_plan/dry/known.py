"""Values of fake tensors that follow from values of the host.

Lengths, masks, token ids and indices decide the shapes of what a GPU computes, so they are computed
on the host beside the fake tensors. What follows from weights or random numbers is unknown.
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
_LIMIT = 1 << 20  # elements; larger values are unknown
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
        """The operation ``func(*args, **kwargs)``, whose result is ``out``."""
        return cls(func, args, kwargs, out, tensors_in((args, kwargs)), tensors_in(out))

    @property
    def name(self) -> str:
        """Name without overload."""
        return self.func.overloadpacket.__name__

    def written(self) -> list[Tensor]:
        """Arguments that it writes to."""
        found: list[Tensor] = []
        for place, name in _traits(self.func).written:
            _collect(self.args[place] if place < len(self.args) else self.kwargs.get(name), found)
        return found


class KnownValues:
    """The values that are known. A view of a fake tensor has a view of its value."""

    def __init__(self) -> None:
        # Storages of values whose twins on the device became unknown.
        self._overwritten: weakref.WeakSet[Any] = weakref.WeakSet()

    def of(self, tensor: Tensor) -> Tensor | None:
        """The tensor's value on the CPU, of its own shape (any shape); None where it is unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= _LIMIT else None
        value = getattr(tensor, "_known", None)
        if value is None or value.untyped_storage() in self._overwritten:
            return None
        return value

    def set(self, tensor: Any, value: Tensor | None) -> None:
        """Set a fake tensor's ``value``, of its shape (any shape) and dtype; None is unknown."""
        tensor._known = value
        if value is not None and isinstance(tensor, FakeTensor):
            storage, twin = tensor.untyped_storage(), value.untyped_storage()
            if storage.nbytes() == twin.nbytes():
                storage._dry_twin = twin  # for tensors that are made of the storage

    def forget(self, tensor: Tensor) -> None:
        """Mark the tensor's values unknown (any shape), and with them those of its views."""
        value = getattr(tensor, "_known", None)
        if value is not None:
            self._overwritten.add(value.untyped_storage())
            self.set(tensor, None)

    def follow(self, operation: Operation) -> None:
        """Do on the host what was done on the device, where all of its inputs are known."""
        func, args, kwargs, out, inputs, outputs = operation
        if func.overloadpacket is _aten.set_:
            self._follow_storage(args[1], out)
            return
        traits = _traits(func)
        if traits.overwrites and self.of(args[0]) is None:
            inputs = inputs[1:]  # what it was does not matter
        values = self._all_of(inputs) if traits.computable else None
        if values is None or any(each.numel() > _LIMIT for each in outputs):
            for tensor in operation.written():
                self.forget(tensor)
            return
        with _disable_current_modes():
            if traits.overwrites and id(args[0]) not in values:
                values[id(args[0])] = torch.empty(args[0].shape, dtype=args[0].dtype)
            host = func(
                *tree_map(lambda each: _on_host(each, values), args),
                **{key: _option_on_host(key, each, values) for key, each in kwargs.items()},
            )
        for tensor, value in zip(outputs, tensors_in(host), strict=True):
            self.set(tensor, value)

    def _all_of(self, tensors: list[Tensor]) -> dict[int, Tensor] | None:
        """The tensors' values by their ids; None: one is unknown."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            value = self.of(tensor)
            if value is None:
                return None
            found[id(tensor)] = value
        return found

    def _follow_storage(self, storage: Any, out: Tensor) -> None:
        """Find the values of a tensor that was made of a storage."""
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

    overwrites: bool  # the first argument, whatever it was
    computable: bool  # from its arguments only
    written: tuple[tuple[int, str], ...]  # place and name of what it writes to


@cache
def _traits(func: Any) -> _Traits:
    return _Traits(
        func.overloadpacket in _OVERWRITING,
        torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in func.overloadpacket.__name__,  # what is there is anything
        tuple(
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among nested arguments or results, which are sequences and mappings."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    # Called for every operation, of which PyTorch's `tree_leaves` took a tenth of the time.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            _collect(each, found)
    elif isinstance(tree, dict):
        for each in tree.values():
            _collect(each, found)


def _on_host(value: Any, values: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return values[id(value)]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _option_on_host(name: str, value: Any, values: dict[int, Any]) -> Any:
    if name == "pin_memory":
        return False
    return tree_map(lambda each: _on_host(each, values), value)
