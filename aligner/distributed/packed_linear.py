"""Linear layers on weights reordered once, for the few-row products of decoding.

A CPU matrix product of 16 to 64 rows spends much of its time rearranging the weight. With oneDNN's
prepacked weights the rearranging is done once per weight update (one pass over the weights) and
the product runs 1.3 to 2 times as fast at these sizes (figures: benchmarks/LOG.md). A packed weight
takes as much memory as the weight, for as long as it is kept.

The result of a row is the same, bit for bit, whatever the number of rows.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

# oneDNN chooses the layout by an expected number of rows. Layouts chosen for many rows are as fast
# as any from 1 to 64 rows here, and unlike the layout chosen for 1 they give the same bits.
_EXPECTED_ROWS = 512

Product = Callable[[Tensor, Tensor | None], Tensor]


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch and this processor have packed products for the weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Product:
    """A function of ``x [..., in]`` and an optional bias ``[out]`` that computes ``x @ weight^T``.

    Args:
        weight: ``[out, in]``; later changes to it do not reach the function.
    """
    if not can_pack(weight):
        fixed = weight.detach()
        return lambda x, bias: torch.nn.functional.linear(x, fixed, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: product(x, packed, bias, "none", [], "")


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Run megatron-core's parallel linear layers in ``model`` on packed weights, without gradients.

    Weights are packed on entry, so enter again after every update. Layers that cannot be packed,
    and experts that do their own communication, keep their own way. Sequence parallelism must be
    off: decoding passes are shorter than the group.
    """
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            forward = _packed_forward(module)
            if forward is not None:
                module.forward = forward
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward  # the class's own shows again


def _packed_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.forward`` does, on packed weights; None if it is not to be replaced."""
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return None
    if module.weight is None or module.explicit_expert_comm or not can_pack(module.weight):
        return None
    assert not module.sequence_parallel
    if isinstance(module, ColumnParallelLinear):
        return _column_forward(module, pack(module.weight))
    return _row_forward(module, pack(module.weight)) if module.input_is_parallel else None


def _column_forward(module: ColumnParallelLinear, product: Product) -> Callable[..., Any]:
    added, returned = (None, module.bias) if module.skip_bias_add else (module.bias, None)

    def forward(input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output = product(input_, added)
        if module.gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output, returned

    return forward


def _row_forward(module: RowParallelLinear, product: Product) -> Callable[..., Any]:
    added, returned = (None, module.bias) if module.skip_bias_add else (module.bias, None)

    def forward(input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output = product(input_, None)
        output = reduce_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output if added is None else output + added, returned

    return forward
