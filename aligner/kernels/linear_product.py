"""Matrix products of linear layers: fast float32 products on CPUs, and products with float32 sums.

`linear_product`: for float32 linear layers, oneDNN is a sixth to a third faster than torch's MKL
(benchmarks/LOG.md), but its rounding error in long sums is twice as large. oneDNN computes outputs
that are short sums, and gradients of inputs. MKL computes other outputs, and gradients of weights.

`packed_linears`: products of 16 to 64 rows in decoding. oneDNN rearranges each weight once per
update. Products then run 1.3 to 2 times as fast, and the copies take the memory of the weights. A
weight that fits in the processor's cache is only transposed, because MKL is fastest in this order.
A row's result is the same, bit for bit, for any number of rows (with torch 2.10 only if sums are
short).

`wide_linear`: sums and results are float32, even for bfloat16 matrices. A GPU returns the float32
sums of exact bfloat16 products (`torch.mm` with ``out_dtype``). Other devices convert the matrices.
In backward, the gradient of the result is rounded to bfloat16 once (relative error 2^-9).

`running_sum`: running sums as matrix products, which are deterministic on a GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# With fewer multiplications, the overhead of calling oneDNN is larger than its gain.
_LEAST_WORK = 2**22
_MOST_TERMS = 512  # maximum number of terms of a sum that oneDNN computes in forward
# Columns of one product in a running sum. Wider rows are cut into blocks.
_WIDEST, _BLOCK = 2048, 512


def has_onednn(tensor: Tensor) -> bool:
    """Return whether oneDNN can multiply float ``tensor`` [..., n] on this processor."""
    if tensor.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if tensor.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return tensor.dtype == torch.float32


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight^T``, float [..., in] by [out, in], without gradients."""
    # For bfloat16, torch.matmul uses oneDNN.
    large = x.numel() * weight.shape[0] >= _LEAST_WORK
    if large and x.dtype == weight.dtype == torch.float32 and has_onednn(weight):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return torch.matmul(x, weight.t())


class Origin(NamedTuple):
    """How to compute a tensor again, bit for bit, as ``function(*sources)``.

    The sources, float ``[...]``, are saved for backward in any case. A linear layer whose input has
    a known origin does not save the input, and computes it again in backward.
    """

    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    def note(self, result: Tensor) -> Tensor:
        """Attach this origin to ``result``, float ``[..., n]``. Views and copies do not have it."""
        setattr(result, _ORIGIN, self)
        return result

    @staticmethod
    def of(tensor: Tensor) -> "Origin | None":
        """Return the origin of ``tensor``, float ``[..., n]``, or None if it is unknown."""
        return getattr(tensor, _ORIGIN, None)


_ORIGIN = "_aligner_origin"


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        function: Callable[..., Tensor] | None,
        *sources: Tensor,
    ) -> Tensor:
        # Without a gradient of the weight (frozen under an adapter) backward needs no input.
        saved = (sources if function else (x,)) if ctx.needs_input_grad[1] else ()
        ctx.function = function
        ctx.save_for_backward(weight, *saved)
        few = weight.shape[1] <= _MOST_TERMS
        return multiply(x, weight) if few else torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        grad_x = multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            x = ctx.function(*saved) if ctx.function else saved[0]
            grad_weight = grad.flatten(0, -2).t() @ x.reshape(-1, weight.shape[1])
        return grad_x, grad_weight, *(None for _ in ctx.needs_input_grad[2:])


def linear_product(x: Tensor, weight: Tensor, origin: Origin | None = None) -> Tensor:
    """Compute ``x @ weight^T``, float [..., in] by [out, in]. ``origin``: origin of ``x``."""
    if origin is None:
        return _LinearProduct.apply(x, weight, None)
    return _LinearProduct.apply(x, weight, origin.function, *origin.sources)


class _Multiplying(nn.Module):
    """Mixin of a parallel linear layer whose float32 products on a CPU are `linear_product`."""

    _origin: Origin | None = None  # origin of the current call's input

    def forward(self, input_: Tensor, *args: Any, **arguments: Any) -> Any:
        """Run megatron-core's forward, which does not save an input with a known origin."""
        self._origin = Origin.of(input_)
        try:
            return super().forward(input_, *args, **arguments)
        finally:
            self._origin = None

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        exchanges = arguments["sequence_parallel"] or arguments["allreduce_dgrad"]
        if exchanges or input.device.type != "cpu" or weight.dtype != torch.float32:
            return super()._forward_impl(input, weight, bias=bias, **arguments)
        output = linear_product(input, weight, self._origin)
        return output if bias is None else output + bias


class ColumnLinear(_Multiplying, ColumnParallelLinear):
    """Linear layer whose outputs are split over tensor-parallel ranks."""


class RowLinear(_Multiplying, RowParallelLinear):
    """Linear layer whose inputs are split over tensor-parallel ranks."""


def has_wide_products(*matrices: Tensor) -> bool:
    """Return whether the device multiplies these matrices [n, m] without float32 copies."""
    return all(_has_kernel(matrix) and matrix.dtype == torch.bfloat16 for matrix in matrices)


def _has_kernel(matrix: Tensor) -> bool:
    return matrix.is_cuda  # PyTorch only implements it for GPUs


def wide_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``left @ right``, [n, k] by [k, m], in float32 or float64, without gradients."""
    if has_wide_products(left, right):
        return torch.mm(left, right, torch.float32, out=out)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_mm(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rounded = grad.to(x.dtype)
        grad_x = torch.mm(rounded, weight) if ctx.needs_input_grad[0] else None
        grad_weight = torch.mm(rounded.t(), x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight^T``, [n, k] by [m, k], in float32 or float64, differentiable."""
    if has_wide_products(x, weight):
        return _WideLinear.apply(x, weight)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).t()


# oneDNN chooses the layout of a weight by an expected number of rows. A layout for many rows is as
# fast as others for 1 to 64 rows. Its results have the same bits for any number of rows.
_EXPECTED_ROWS = 512
_CACHED_BYTES = 2**18  # weights up to this size remain in the cache between products
_ROWS = 16  # products of such weights are padded to multiples of this, so that one kernel runs


class Product:
    """``x @ weight^T`` with ``weight``, float [out, in], fast for few rows of ``x``.

    The first call copies a large weight to another layout. Later changes of the weight have no
    effect on the copy.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._outputs = weight.shape[0]
        size = weight.numel() * weight.element_size()
        self._in_cache = weight.device.type == "cpu" and size <= _CACHED_BYTES
        self.packed = not self._in_cache and has_onednn(weight)

    @functools.cached_property
    def ready(self) -> Tensor:
        """Weight in the layout that the product needs."""
        if self.packed:
            return torch.ops.mkldnn._reorder_linear_weight(self.weight, _EXPECTED_ROWS)
        return self.weight.t().contiguous() if self._in_cache else self.weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight^T + bias``, float [..., out], for ``x`` [..., in]."""
        if x.numel() == 0:  # an expert without tokens
            return x.new_zeros(*x.shape[:-1], self._outputs)
        if self._in_cache:
            rows = x.flatten(0, -2)
            product = torch.mm(_padded_rows(rows), self.ready)
            if product.shape[:-1] != x.shape[:-1]:
                product = product[: rows.shape[0]].view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        if not self.packed:
            return F.linear(x, self.ready, bias)
        if x.numel() == x.shape[-1]:  # one row
            return self(_two_rows(x.reshape(1, -1)), bias)[:1].view(*x.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.ready, bias, "none", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Compute ``residual + x @ weight^T``, float [n, out], in one pass over the result."""
        if self._in_cache:
            padded_residual, padded_x = _padded_rows(residual), _padded_rows(x)
            return torch.addmm(padded_residual, padded_x, self.ready)[: x.shape[0]]
        if self.weight.is_cuda:
            return torch.addmm(residual, x, self.weight.t())
        if not self.packed:
            return residual + F.linear(x, self.ready)
        if x.shape[0] == 1:
            return self.added_to(_two_rows(residual), _two_rows(x))[:1]
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.ready, None, "add")


class GatedProduct:
    """SwiGLU, ``silu(x @ gate^T) * (x @ up^T)``. ``weight``: gate and up, [2 * F, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._both = Product(weight)
        self._gate, self._up = (Product(half) for half in weight.chunk(2))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute SwiGLU, float [n, F], of ``x``, float [n, in]."""
        if not self._gate.packed:
            # Two separate products would be contiguous blocks, whose last elements torch rounds
            # differently from the rest.
            gate, up = self._both(x).chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        if x.shape[0] == 1:
            return self(_two_rows(x))[:1]
        multiply = torch.ops.mkldnn._linear_pointwise
        gate = multiply.default(x, self._gate.ready, None, "swish", [], "")
        return multiply.binary(x, gate, self._up.ready, None, "mul")


def _padded_rows(x: Tensor) -> Tensor:
    missing = -x.shape[0] % _ROWS
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _two_rows(row: Tensor) -> Tensor:
    """Add a row of zeros to [1, in], because oneDNN sums a single row in another order."""
    return F.pad(row, (0, 0, 0, 1))


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[dict[nn.Module, Product]]:
    """Run megatron-core's parallel linear layers in ``model`` on packed weights, without gradients.

    Yields the product of every replaced layer. Packed weights include adapters, and are computed at
    entry: enter again after every update. Experts whose layers communicate are not replaced.
    Sequence parallelism must be off.
    """
    products: dict[nn.Module, Product] = {}
    try:
        for module in model.modules():
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            has_local_inputs = isinstance(module, ColumnParallelLinear) or module.input_is_parallel
            if module.weight is None or module.explicit_expert_comm or not has_local_inputs:
                continue
            assert not module.sequence_parallel
            adapter = getattr(module, "lora", None)
            weight = module.weight if adapter is None else adapter.merged_into(module.weight)
            products[module] = Product(weight)
            module.forward = functools.partial(_packed_forward, module, products[module])
        yield products
    finally:
        for module in products:
            del module.forward  # restores the method of the class


def _packed_forward(
    module: ColumnParallelLinear | RowParallelLinear, product: Product, input_: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer's output with its packed weight. Also return a bias that is not added."""
    added, returned = (None, module.bias) if module.skip_bias_add else (module.bias, None)
    if isinstance(module, ColumnParallelLinear):
        output = product(input_, added)
        if module.gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output, returned
    output = reduce_from_tensor_model_parallel_region(product(input_), group=module.tp_group)
    return output if added is None else output + added, returned


def running_sum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute cumulative sums along the columns of float [n, m], in ``dtype`` (default: input's).

    On a GPU with deterministic algorithms, matrix products replace `torch.cumsum`.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(values).to(dtype or values.dtype)
    return values.cumsum(dim=1, dtype=dtype)


def sum_by_products(values: Tensor) -> Tensor:
    """Compute `running_sum` as matrix products, float64 [n, m].

    A row of at most 2,048 columns is one product. Its sums therefore never decrease, and columns of
    0 do not change them.
    """
    rows, columns = values.shape
    width = columns if columns <= _WIDEST else _BLOCK
    blocks = F.pad(values.double(), (0, -columns % width)).view(rows, -1, width)
    ones = torch.ones(width, width, dtype=blocks.dtype, device=blocks.device)
    sums = blocks @ ones.triu()
    if blocks.shape[1] > 1:
        # Add the total of all earlier blocks.
        count = blocks.shape[1]
        sums = sums + (sums[:, :, -1] @ ones.new_ones(count, count).triu(1))[:, :, None]
    return sums.flatten(1)[:, :columns]
