"""Functions that `torch.compile` would make one kernel of, which need not be run every time.

What they return has the same shape whenever what they are given has, and on the dry device shapes
are all there is.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.dry.known import KnownValues, tensors_in


class _Made(NamedTuple):
    """A tensor that a function made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class RememberedKernel:
    """Calls of ``function`` with tensors of shapes that it was called with before only make memory.

    Where gradients are followed, a value is known, or the result is a view, it is run.
    """

    def __init__(self, function: Callable[..., Any], known: KnownValues) -> None:
        self._function, self._known = function, known
        self._made: dict[Hashable, _Made] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the function, as far as its shape goes."""
        operands = tensors_in((args, kwargs))
        if (torch.is_grad_enabled() and any(each.requires_grad for each in operands)) or not any(
            self._known.of(each) is None for each in operands
        ):
            return self._function(*args, **kwargs)
        given = (tuple(map(_given, args)), tuple((key, _given(kwargs[key])) for key in kwargs))
        if given in self._made:
            made = self._made[given]
            return torch.empty_strided(
                made.shape, made.stride, dtype=made.dtype, device=made.device
            )
        result = self._function(*args, **kwargs)
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if all(each.untyped_storage()._cdata != storage._cdata for each in operands):
                self._made[given] = _Made(
                    tuple(result.shape), result.stride(), result.dtype, result.device
                )
        return result


def _given(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    return argument if isinstance(argument, Hashable) else repr(argument)
