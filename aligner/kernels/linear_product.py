"""Products of linear layers: fast float32 products on CPUs, and products with float32 sums.

`linear_product`: for float32 linears of a transformer, oneDNN is a sixth to a third faster than
torch's MKL (benchmarks/LOG.md), but adds the terms of a sum one by one, with twice the rounding
error in long sums. It computes gradients of inputs, and outputs with few terms. MKL computes the
gradient of the weight.

`packed_linears`: products of 16 to 64 rows in decoding. oneDNN's prepacked weights are rearranged
once per weight update and run 1.3 to 2 times as fast, for the memory of another weight. A weight
that fits in the processor's cache is only transposed, into the order in which MKL is fastest. A
row's result is the same, bit for bit, for any number of rows (with torch 2.10 only if sums are
short).

`wide_linear`: sums and results are float32, also for bfloat16 matrices. A GPU returns the float32
sums of exact bfloat16 products (`torch.mm` with ``out_dtype``), other devices convert the matrices.
In backward the gradient of the logits is rounded to bfloat16 once, with a relative error of 2^-9.

`running_sum`: running sums as products, which are deterministic on a GPU.
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

# Below this many multiplications the call around oneDNN's product costs more than it gains.
_LEAST_WORK = 2**22
_MOST_TERMS = 512  # of a sum in forward
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
    """Multiply ``x`` float [..., in] by ``weight`` [out, in] to [..., out], without gradients."""
    # In bfloat16 torch itself uses oneDNN.
    large = x.numel() * weight.shape[0] >= _LEAST_WORK
    if large and x.dtype == weight.dtype == torch.float32 and has_onednn(weight):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return torch.matmul(x, weight.t())


class Origin(NamedTuple):
    """A function that recomputes a tensor from saved tensors: ``function(*sources)``.

    The sources, float ``[...]``, are saved for backward in any case. A linear whose input, float
    ``[..., n]``, has a known origin saves no input and recomputes it bit for bit.
    """

    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    def note(self, result: Tensor) -> Tensor:
        """Attach the origin to ``result``, float ``[..., n]``, but not to its views and copies."""
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
    """Multiply ``x`` float [..., in] of this ``origin`` by ``weight`` [out, in] to [..., out]."""
    if origin is None:
        return _LinearProduct.apply(x, weight, None)
    return _LinearProduct.apply(x, weight, origin.function, *origin.sources)


class _Multiplying(nn.Module):
    """Mixin that replaces the products of a parallel linear."""

    _origin: Origin | None = None  # of the input of the current call

    def forward(self, input_: Tensor, *args: Any, **arguments: Any) -> Any:
        """Run megatron-core's forward without saving an input of known origin for backward."""
        self._origin = Origin.of(input_)
        try:
            return super().forward(input_, *args, **arguments)
        finally:
            self._origin = None

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        """Multiply ``[s, b, in]`` by this rank's part of the weight to ``[s, b, out]``."""
        exchanges = arguments["sequence_parallel"] or arguments["allreduce_dgrad"]
        if exchanges or input.device.type != "cpu" or weight.dtype != torch.float32:
            return super()._forward_impl(input, weight, bias=bias, **arguments)
        output = linear_product(input, weight, self._origin)
        return output if bias is None else output + bias


class ColumnLinear(_Multiplying, ColumnParallelLinear):
    """A linear whose outputs are split over ranks."""


class RowLinear(_Multiplying, RowParallelLinear):
    """A linear whose inputs are split over ranks."""


def has_wide_products(*matrices: Tensor) -> bool:
    """Return whether these matrices [n, m] are multiplied without float32 copies."""
    return all(_has_kernel(matrix) and matrix.dtype == torch.bfloat16 for matrix in matrices)


def _has_kernel(matrix: Tensor) -> bool:
    return matrix.is_cuda  # PyTorch only implements it for GPUs


def wide_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``left @ right``, [n, k] by [k, m], in float32 or wider, without gradients."""
    if has_wide_products(left, right):
        return torch.mm(left, right, torch.float32, out=out)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


class _WideLinear(torch.autograd.Function):
    """Linear of bfloat16 matrices on a GPU. The module explains how gradients are rounded."""

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


# oneDNN chooses the layout by an expected number of rows. Layouts for many rows are as fast as
# others from 1 to 64 rows, and unlike the layout for 1 row their results have the same bits.
_EXPECTED_ROWS = 512
_CACHED_BYTES = 2**18  # weights up to this size remain in the cache between products
_ROWS = 16  # their products run on a multiple of these rows, so that one kernel rounds all


class Product:
    """``x @ weight^T`` for ``weight`` float [out, in], fast for few rows of ``x``.

    The first call packs a large weight. Later changes to the weight do not reach the packed copy.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._outputs = weight.shape[0]
        size = weight.numel() * weight.element_size()
        self._in_cache = weight.device.type == "cpu" and size <= _CACHED_BYTES
        self.packed = not self._in_cache and has_onednn(weight)

    @functools.cached_property
    def ready(self) -> Tensor:
        """The weight in the layout of the product."""
        if self.packed:
            return torch.ops.mkldnn._reorder_linear_weight(self.weight, _EXPECTED_ROWS)
        return self.weight.t().contiguous() if self._in_cache else self.weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x`` float [..., in] to [..., out]."""
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
    """SwiGLU, ``silu(x @ gate^T) * (x @ up^T)``, in two fused products. ``weight``: [2 * F, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._both = Product(weight)
        self._gate, self._up = (Product(half) for half in weight.chunk(2))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute SwiGLU of ``x``, float [n, in] to [n, F]."""
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
    """Pad [n, in] with zero rows to a multiple of `_ROWS`."""
    missing = -x.shape[0] % _ROWS
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _two_rows(row: Tensor) -> Tensor:
    """Add a row of zeros to [1, in], because oneDNN sums a single row in another order."""
    return F.pad(row, (0, 0, 0, 1))


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[dict[nn.Module, Product]]:
    """Run megatron-core's parallel linear layers in ``model`` on packed weights, without gradients.

    Yields the product of every replaced layer. Weights are packed on entry with merged adapters, so
    enter again after every update. Experts that communicate themselves are not replaced. Sequence
    parallelism must be off.
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
    """Compute the output of a layer with its packed weight, and the bias that is not yet added."""
    added, returned = (None, module.bias) if module.skip_bias_add else (module.bias, None)
    if isinstance(module, ColumnParallelLinear):
        output = product(input_, added)
        if module.gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output, returned
    output = reduce_from_tensor_model_parallel_region(product(input_), group=module.tp_group)
    return output if added is None else output + added, returned


def running_sum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum float [n, m] up to and including each column, in ``dtype``, by default the input's.

    If deterministic operations are requested on a GPU, products replace `torch.cumsum`.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(values).to(dtype or values.dtype)
    return values.cumsum(dim=1, dtype=dtype)


def sum_by_products(values: Tensor) -> Tensor:
    """Compute `running_sum` as matrix products, float64 [n, m].

    A row of at most 2,048 columns is one product, so that its sums never fall and zeros change
    nothing.
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
