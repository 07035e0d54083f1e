"""Rules of GPU kernels that fake tensors do not enforce: equal dtypes, deterministic results."""

import re
from typing import Any

import torch

from aligner.errors import DryDeviceError
from aligner_plan.dry.known import tensors_in
from aligner_plan.dry.record import running_function

# Kernels whose float operands must have one dtype.
_OF_ONE_DTYPE = re.compile(
    "mm|bmm|addmm_?|baddbmm_?|linear|dot|mv|_grouped_mm|convolution|native_layer_norm|"
    "_scaled_dot_product_(flash|efficient)_attention"
)
# Operations for which `torch.use_deterministic_algorithms` raises on a GPU. The first three only
# raise in some cases.
_NONDETERMINISTIC = re.compile(
    r"(cumsum|bincount|scatter_reduce|histc|put|(nan)?median|nll_loss(2d)?_forward|max_unpool\dd|"
    r"_ctc_loss_backward|(avg_pool3d|_?adaptive_(avg|max)_pool\dd|fractional_max_pool\dd|"
    r"reflection_pad\dd|upsample_((bi|tri)?linear|bicubic)\dd|grid_sampler_\dd)_backward)_?"
)
# Functions that may create float64 matrices on the device: sums that decide the drawn token, and
# sums of masks. Vectors and scalars may be float64 everywhere.
_WIDE = re.compile(
    r"sampling\.(_cumulative|inverse_cdf|_first_above|_ban|counter_uniforms)|responses\.(__init__|refill)|"
    r"linear_product\.(running_sum|sum_by_products)|collectives\.count_denominators"
)


def refuse_operands(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse an operation that a GPU refuses.

    Raises:
        DryDeviceError: the operands of a product or norm have two float dtypes, or deterministic
            algorithms were requested and PyTorch has none for the operation.
    """
    name = func.overloadpacket.__name__
    needs_one_dtype = _OF_ONE_DTYPE.fullmatch(name) is not None
    if not needs_one_dtype and not torch.are_deterministic_algorithms_enabled():
        return
    # Operands of one dtype.
    operands = [tensor for tensor in tensors_in(args) if tensor.is_cuda]
    if needs_one_dtype:
        dtypes = [str(tensor.dtype) for tensor in operands if tensor.is_floating_point()]
        if "dtype" in func._overloadname:  # the first operand is a wide addend
            dtypes = dtypes[-2:]
        if len(set(dtypes)) > 1:
            raise DryDeviceError(
                f"{name} of {' and '.join(sorted(set(dtypes)))} in {running_function()}. Cast one "
                "to the other's dtype"
            )
    # Deterministic results.
    elif _NONDETERMINISTIC.fullmatch(name):
        dtype = kwargs.get("dtype") or (operands[0].dtype if operands else torch.int64)
        is_deterministic = {
            "cumsum": not dtype.is_floating_point,
            "bincount": len(operands) < 2 and kwargs.get("weights") is None,
            "scatter_reduce": "prod" not in args,
        }
        if operands and not is_deterministic.get(name.rstrip("_"), False):
            raise DryDeviceError(
                f"{name} in {running_function()} has no deterministic implementation on a GPU, and "
                "deterministic algorithms were requested"
            )


def refuse_wide(tensor: torch.Tensor) -> None:
    """Raise `DryDeviceError` for a float64 matrix (any shape) on the device."""
    is_wide = tensor.dtype is torch.float64 and tensor.is_cuda and tensor.squeeze().dim() > 1
    if is_wide and not _WIDE.fullmatch(running_function()):
        raise DryDeviceError(
            f"a float64 tensor {list(tensor.shape)} on the device, by {running_function()}. Its "
            "arithmetic takes at least twice the time: use float32"
        )
