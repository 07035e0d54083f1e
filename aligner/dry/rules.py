"""Rules of a GPU's kernels that fake tensors do not keep: dtypes that meet, sums that repeat."""

from collections.abc import Callable
from typing import Any

import torch

from aligner.dry.known import tensors_in
from aligner.dry.record import running_place
from aligner.errors import DryDeviceError

_aten = torch.ops.aten
# Kernels whose float operands have one dtype. Those that take another for the result, as products
# of bfloat16 with float32 sums, add to a float32 tensor.
_OF_ONE_DTYPE = {
    *(_aten.mm, _aten.bmm, _aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_, _aten.linear),
    *(_aten.dot, _aten.mv, _aten._grouped_mm, _aten.convolution),
    _aten.native_layer_norm,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
}
# Functions that may make float64 matrices on the device: sums that decide which token is drawn, and
# statistics that are a number a row. Vectors and single numbers may be float64 everywhere.
_MAY_BE_WIDE = {
    *("sampling._cumulative", "sampling._locate", "sampling._first_above", "sampling._ban"),
    *("sampling.counter_uniforms", "running_sum.running_sum", "running_sum.sum_by_products"),
    *("scheduler.__init__", "model.count_denominators"),
}


def _floats(args: Any) -> bool:
    return any(each.is_floating_point() for each in tensors_in(args))


# What `torch.use_deterministic_algorithms` says it throws at on a GPU, and when.
_UNREPEATABLE: dict[Any, Callable[[Any, dict[str, Any]], bool]] = {
    _aten.cumsum: lambda args, kwargs: _floats(args[:1]) or kwargs.get("dtype") in _FLOATS,
    _aten.cumsum_: lambda args, kwargs: _floats(args[:1]),
    _aten.bincount: lambda args, kwargs: len(args) > 1 or kwargs.get("weights") is not None,
    _aten.scatter_reduce: lambda args, kwargs: "prod" in args,
    _aten.scatter_reduce_: lambda args, kwargs: "prod" in args,
    **dict.fromkeys(
        (
            *(_aten.histc, _aten.put, _aten.put_, _aten.nll_loss_forward, _aten.nll_loss2d_forward),
            *(_aten.avg_pool3d_backward, _aten._adaptive_avg_pool2d_backward),
            *(_aten._adaptive_avg_pool3d_backward, _aten.adaptive_max_pool2d_backward),
            *(_aten.max_unpool2d, _aten.max_unpool3d, _aten.grid_sampler_2d_backward),
            *(_aten.reflection_pad1d_backward, _aten.reflection_pad2d_backward),
            *(_aten.upsample_linear1d_backward, _aten.upsample_bilinear2d_backward),
            *(_aten.upsample_bicubic2d_backward, _aten.upsample_trilinear3d_backward),
            *(_aten._ctc_loss_backward, _aten.grid_sampler_3d_backward),
        ),
        lambda args, kwargs: True,
    ),
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def refuse_what_a_gpu_refuses(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise as a GPU would where fake tensors do not.

    Raises:
        DryDeviceError: a product or norm of two float dtypes; or, where operations that repeat
            were chosen, one of which PyTorch has none.
    """
    packet = func.overloadpacket
    if packet in _OF_ONE_DTYPE:
        operands = [each for each in tensors_in(args) if each.is_floating_point()]
        if "dtype" in func._overloadname:  # the first is what a product with wide sums adds to
            operands = operands[-2:]
        dtypes = {str(each.dtype) for each in operands if each.is_cuda}
        if len(dtypes) > 1:
            raise DryDeviceError(
                f"{packet.__name__} of {' and '.join(sorted(dtypes))} in {running_place()}; cast "
                "one to the other's dtype"
            )
    elif packet in _UNREPEATABLE and torch.are_deterministic_algorithms_enabled():
        on_device = any(each.is_cuda for each in tensors_in((args, kwargs)))
        if on_device and _UNREPEATABLE[packet](args, kwargs):
            raise DryDeviceError(
                f"{packet.__name__} in {running_place()} has no deterministic implementation on a "
                "GPU, and deterministic algorithms were chosen"
            )


def refuse_wide(tensor: torch.Tensor) -> None:
    """Refuse a float64 matrix (any shape) on the device, except where it is known to be small.

    Raises:
        DryDeviceError: it is one.
    """
    if tensor.dtype is torch.float64 and tensor.is_cuda and tensor.squeeze().dim() > 1:
        place = running_place()
        if place not in _MAY_BE_WIDE:
            raise DryDeviceError(
                f"a float64 tensor {list(tensor.shape)} on the device, by {place}; a GPU does such "
                "arithmetic at half the speed or less"
            )
