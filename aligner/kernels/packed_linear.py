"""Linear layers on weights reordered once, for the few-row products of decoding.

A CPU matrix product of 16 to 64 rows spends much of its time rearranging the weight. With oneDNN's
prepacked weights the rearranging is done once per weight update (one pass over the weights) and
the product runs 1.3 to 2 times as fast at these sizes (figures: benchmarks/LOG.md). A packed weight
takes as much memory as the weight, for as long as it is kept.

A weight that stays in the processor's cache is not packed: there the call around oneDNN's product
costs more than the rearranging; it is only transposed once, the order that MKL likes best.

The result of a row is the same, bit for bit, whatever the number of rows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from aligner.kernels.linear_product import has_onednn

# oneDNN chooses the layout by an expected number of rows. Layouts chosen for many rows are as fast
# as any from 1 to 64 rows here, and unlike the layout chosen for 1 they give the same bits.
_EXPECTED_ROWS = 512
_CACHED_BYTES = 2**18  # weights up to this size stay in the cache between products
_ROWS = 16  # products on such weights run on a multiple of this many rows: one kernel, one rounding


class Product:
    """``x @ weight^T``, in the form that is fast for few rows of ``x``.

    Packed where torch can and the weight is large, on the first call; later changes to the weight
    do not reach the packed copy.
    """

    def __init__(self, weight: Tensor) -> None:
        """``weight``: float [out, in]."""
        self.weight = weight.detach()
        self._outputs = weight.shape[0]
        size = weight.numel() * weight.element_size()
        self._in_cache = weight.device.type == "cpu" and size <= _CACHED_BYTES
        self.packed = not self._in_cache and has_onednn(weight)

    @functools.cached_property
    def ready(self) -> Tensor:
        """The weight as the product reads it."""
        if self.packed:
            return torch.ops.mkldnn._reorder_linear_weight(self.weight, _EXPECTED_ROWS)
        return self.weight.t().contiguous() if self._in_cache else self.weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` float [..., in] to [..., out]."""
        if x.numel() == 0:  # an expert that no token was sent to
            return x.new_zeros(*x.shape[:-1], self._outputs)
        if self._in_cache:
            rows = x.flatten(0, -2)
            product = torch.mm(_whole(rows), self.ready)
            if product.shape[:-1] != x.shape[:-1]:
                product = product[: rows.shape[0]].view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        if not self.packed:
            return F.linear(x, self.ready, bias)
        if x.numel() == x.shape[-1]:  # one row
            return self(_accompanied(x.reshape(1, -1)), bias)[:1].view(*x.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.ready, bias, "none", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + x @ weight^T`` float [n, out] in one pass over the result."""
        if self._in_cache:
            return torch.addmm(_whole(residual), _whole(x), self.ready)[: x.shape[0]]
        if self.weight.is_cuda:
            return torch.addmm(residual, x, self.weight.t())
        if not self.packed:
            return residual + F.linear(x, self.ready)
        if x.shape[0] == 1:
            return self.added_to(_accompanied(residual), _accompanied(x))[:1]
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.ready, None, "add")


class GatedProduct:
    """``silu(x @ gate^T) * (x @ up^T)``: SwiGLU, as two products that end in its two steps."""

    def __init__(self, weight: Tensor) -> None:
        """``weight``: float [2 * F, in], the gate in the first half."""
        self._both = Product(weight)
        self._gate, self._up = (Product(half) for half in weight.chunk(2))

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` float [n, in] to [n, F]."""
        if not self._gate.packed:
            # Apart, the two would be whole blocks of memory, whose last numbers torch rounds
            # otherwise than the rest.
            gate, up = self._both(x).chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        if x.shape[0] == 1:
            return self(_accompanied(x))[:1]
        multiply = torch.ops.mkldnn._linear_pointwise
        gate = multiply.default(x, self._gate.ready, None, "swish", [], "")
        return multiply.binary(x, gate, self._up.ready, None, "mul")


def _whole(x: Tensor) -> Tensor:
    """[n, in] with zero rows added up to a multiple of `_ROWS`."""
    missing = -x.shape[0] % _ROWS
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _accompanied(row: Tensor) -> Tensor:
    """[1, in] and a row of zeros: oneDNN adds up the terms of a single row in another order."""
    return F.pad(row, (0, 0, 0, 1))


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[dict[nn.Module, Product]]:
    """Run megatron-core's parallel linear layers in ``model`` on packed weights, without gradients.

    Yields the product of every layer so treated. Weights are packed on entry, with adapters merged
    into them, so enter again after every update. Layers that cannot be packed, and experts that do
    their own communication, keep their own way. Sequence parallelism must be off: decoding passes
    are shorter than the group.
    """
    products: dict[nn.Module, Product] = {}
    try:
        for module in model.modules():
            if _is_replaceable(module):
                products[module] = Product(_whole_weight(module))
                module.forward = _forward_of(module, products[module])
        yield products
    finally:
        for module in products:
            del module.forward  # the class's own shows again


def _is_replaceable(module: nn.Module) -> bool:
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return False
    if module.weight is None or module.explicit_expert_comm:
        return False
    return not isinstance(module, RowParallelLinear) or module.input_is_parallel


def _whole_weight(module: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    """The weight, with its adapter added where it has one."""
    adapter = getattr(module, "lora", None)
    return module.weight if adapter is None else adapter.merged_into(module.weight)


def _forward_of(
    module: ColumnParallelLinear | RowParallelLinear, product: Product
) -> Callable[..., Any]:
    assert not module.sequence_parallel
    if isinstance(module, ColumnParallelLinear):
        return _column_forward(module, product)
    return _row_forward(module, product)


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
        output = product(input_)
        output = reduce_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output if added is None else output + added, returned

    return forward
