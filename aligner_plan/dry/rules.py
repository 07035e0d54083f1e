"""Rules of a GPU's kernels that fake tensors do not keep: dtypes that meet, results that repeat."""

import re
from functools import cache
from typing import Any

import torch

from aligner.errors import DryDeviceError
from aligner_plan.dry.known import tensors_in
from aligner_plan.dry.record import running_place

# Kernels whose float operands have one dtype.
_OF_ONE_DTYPE = re.compile(
    "mm|bmm|addmm_?|baddbmm_?|linear|dot|mv|_grouped_mm|convolution|native_layer_norm|"
    "_scaled_dot_product_(flash|efficient)_attention"
)
# What `torch.use_deterministic_algorithms` says it throws at on a GPU; the first three not always.
_UNREPEATABLE = re.compile(
    r"(cumsum|bincount|scatter_reduce|histc|put|(nan)?median|nll_loss(2d)?_forward|max_unpool\dd|"
    r"_ctc_loss_backward|(avg_pool3d|_?adaptive_(avg|max)_pool\dd|fractional_max_pool\dd|"
    r"reflection_pad\dd|upsample_((bi|tri)?linear|bicubic)\dd|grid_sampler_\dd)_backward)_?"
)
# Functions that may make float64 matrices on the device: sums that decide which token is drawn, and
# sums of masks. Vectors and single numbers may be float64 everywhere.
_WIDE = re.compile(
    r"sampling\.(_cumulative|inverse_cdf|_first_above|_ban|counter_uniforms)|responses\.(__init__|refill)|"
    r"running_sum\.(running_sum|sum_by_products)|model\.count_denominators"
)


def refuse_operands(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse an operation as a GPU would.

    Raises:
        DryDeviceError: a product or norm of two float dtypes; or, where operations that repeat
            were chosen, one of which PyTorch has none.
    """
    name = func.overloadpacket.__name__
    takes_one_dtype = _takes_one_dtype(name)
    if not takes_one_dtype and not torch.are_deterministic_algorithms_enabled():
        return
    operands = [each for each in tensors_in(args) if each.is_cuda]
    if takes_one_dtype:
        dtypes = [str(each.dtype) for each in operands if each.is_floating_point()]
        if "dtype" in func._overloadname:  # before the two factors: what wide sums are added to
            dtypes = dtypes[-2:]
        if len(set(dtypes)) > 1:
            raise DryDeviceError(
                f"{name} of {' and '.join(sorted(set(dtypes)))} in {running_place()}; cast one to "
                "the other's dtype"
            )
    elif _UNREPEATABLE.fullmatch(name):
        dtype = kwargs.get("dtype") or (operands[0].dtype if operands else torch.int64)
        harmless = {
            "cumsum": not dtype.is_floating_point,
            "bincount": len(operands) < 2 and kwargs.get("weights") is None,
            "scatter_reduce": "prod" not in args,
        }
        if operands and not harmless.get(name.rstrip("_"), False):
            raise DryDeviceError(
                f"{name} in {running_place()} has no deterministic implementation on a GPU, and "
                "deterministic algorithms were chosen"
            )


@cache
def _takes_one_dtype(name: str) -> bool:
    return _OF_ONE_DTYPE.fullmatch(name) is not None


def refuse_wide(tensor: torch.Tensor) -> None:
    """Refuse a float64 matrix (any shape) on the device; raises `DryDeviceError`."""
    is_wide = tensor.dtype is torch.float64 and tensor.is_cuda and tensor.squeeze().dim() > 1
    if is_wide and not _WIDE.fullmatch(running_place()):
        raise DryDeviceError(
            f"a float64 tensor {list(tensor.shape)} on the device, by {running_place()}; its "
            "arithmetic takes twice the time or more"
        )
