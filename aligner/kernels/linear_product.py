"""Products of linear layers: float32 ones on CPU by oneDNN, and ones whose sums are float32.

`linear_product`: torch gives products of float32 matrices to MKL. For the shapes of a transformer's
linear layers oneDNN takes a sixth to a third less time on the processors tried (figures:
benchmarks/LOG.md), but adds up all terms of a sum one after the other, which rounds twice as much
where they are many. It is used for gradients of inputs, and for outputs of few terms. The gradient
of the weight, a product over rows, stays with MKL, which is faster there. megatron-core's parallel
linears have it too.

`packed_linears`: the few-row products of decoding. A CPU matrix product of 16 to 64 rows spends
much of its time rearranging the weight. With oneDNN's prepacked weights the rearranging is done
once per weight update (one pass over the weights) and the product runs 1.3 to 2 times as fast at
these sizes. A packed weight takes as much memory as the weight, for as long as it is kept. A weight
that stays in the processor's cache is not packed: there the call around oneDNN's product costs more
than the rearranging; it is only transposed once, the order that MKL likes best. The result of a row
is the same, bit for bit, whatever the number of rows.

`wide_linear`: sums and results are float32, of bfloat16 matrices too. A GPU multiplies bfloat16
numbers exactly, adds them up in float32 and can hand that out as it is (`torch.mm` with
``out_dtype``): the same numbers as with float32 copies of the matrices, at the speed of its
bfloat16 units. Elsewhere the matrices are converted. In gradients one factor is float32 itself: the
gradient of the logits. It is rounded to bfloat16 once, relative error 2^-9 of each number, as the
logits' gradient has in every library that keeps bfloat16 logits; sums over it are float32 again.
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
_MOST_TERMS = 512  # of a sum in the forward pass


def has_onednn(tensor: Tensor) -> bool:
    """Return whether oneDNN has products for float ``tensor`` [..., n] here."""
    if tensor.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if tensor.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return tensor.dtype == torch.float32


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` float [..., in] times ``weight`` [out, in] to [..., out], without gradients."""
    # In bfloat16 torch's own product is oneDNN's.
    large = x.numel() * weight.shape[0] >= _LEAST_WORK
    if large and x.dtype == weight.dtype == torch.float32 and has_onednn(weight):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return torch.matmul(x, weight.t())


class Origin(NamedTuple):
    """The way to a tensor from others that the backward pass keeps anyway: ``function(*sources)``.

    A linear that is given such a tensor, ``[..., n]``, keeps its sources (float ``[...]``) and not
    the tensor, and makes it again for the weight's gradient, to the bit.
    """

    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    def note(self, made: Tensor) -> Tensor:
        """``made``, float ``[..., n]``; `of` then knows it, but no view and no copy of it."""
        setattr(made, _ORIGIN, self)
        return made

    @staticmethod
    def of(tensor: Tensor) -> "Origin | None":
        """Origin of ``tensor``, float ``[..., n]``; None: it is not known."""
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
        # A frozen weight, as under an adapter, needs no input in the backward pass.
        kept = (sources if function else (x,)) if ctx.needs_input_grad[1] else ()
        ctx.function = function
        ctx.save_for_backward(weight, *kept)
        few = weight.shape[1] <= _MOST_TERMS
        return multiply(x, weight) if few else torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        grad_x = multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            x = ctx.function(*kept) if ctx.function else kept[0]
            grad_weight = grad.flatten(0, -2).t() @ x.reshape(-1, weight.shape[1])
        return grad_x, grad_weight, *(None for _ in ctx.needs_input_grad[2:])


def linear_product(x: Tensor, weight: Tensor, origin: Origin | None = None) -> Tensor:
    """``x`` float [..., in] times ``weight`` [out, in] to [..., out].

    ``origin``: of ``x``, whose sources are kept in its place. It makes the elements of ``x`` in
    their order, in any shape.
    """
    if origin is None:
        return _LinearProduct.apply(x, weight, None)
    return _LinearProduct.apply(x, weight, origin.function, *origin.sources)


class _Multiplying(nn.Module):
    """Mixin before a parallel linear: the products that it computes."""

    _origin: Origin | None = None  # of the input of the call under way

    def forward(self, input_: Tensor, *args: Any, **arguments: Any) -> Any:
        """As megatron-core's; an input of known origin is not kept for backward."""
        self._origin = Origin.of(input_)
        try:
            return super().forward(input_, *args, **arguments)
        finally:
            self._origin = None

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        """``[s, b, in]`` to ``[s, b, out]``, of this rank's part of the weight."""
        exchanges = arguments["sequence_parallel"] or arguments["allreduce_dgrad"]
        if exchanges or input.device.type != "cpu" or weight.dtype != torch.float32:
            return super()._forward_impl(input, weight, bias=bias, **arguments)
        output = linear_product(input, weight, self._origin)
        return output if bias is None else output + bias


class ColumnLinear(_Multiplying, ColumnParallelLinear):
    """A linear whose outputs are shared out."""


class RowLinear(_Multiplying, RowParallelLinear):
    """A linear whose inputs are shared out."""


def has_wide_products(*matrices: Tensor) -> bool:
    """Return whether these matrices [n, m] are multiplied as they are, without a float32 copy."""
    return all(_has_kernel(each) and each.dtype == torch.bfloat16 for each in matrices)


def _has_kernel(matrix: Tensor) -> bool:
    return matrix.is_cuda  # PyTorch has it only for GPUs


def wide_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``left @ right``, [n, k] by [k, m], without gradients.

    float32, or float64 for float64 matrices. ``out``: where the result goes, of its dtype.
    """
    if has_wide_products(left, right):
        return torch.mm(left, right, torch.float32, out=out)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


class _WideLinear(torch.autograd.Function):
    """Linear of bfloat16 matrices on a GPU; see the module for how gradients are rounded."""

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
    """``x @ weight^T``, [n, k] by [m, k], float32 at least, differentiable."""
    if has_wide_products(x, weight):
        return _WideLinear.apply(x, weight)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).t()


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
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            is_whole = isinstance(module, ColumnParallelLinear) or module.input_is_parallel
            if module.weight is None or module.explicit_expert_comm or not is_whole:
                continue
            assert not module.sequence_parallel
            adapter = getattr(module, "lora", None)
            weight = module.weight if adapter is None else adapter.merged_into(module.weight)
            products[module] = Product(weight)
            module.forward = functools.partial(_packed_forward, module, products[module])
        yield products
    finally:
        for module in products:
            del module.forward  # the class's own shows again


def _packed_forward(
    module: ColumnParallelLinear | RowParallelLinear, product: Product, input_: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The layer's output and the bias that is still to be added, by its packed weight."""
    added, returned = (None, module.bias) if module.skip_bias_add else (module.bias, None)
    if isinstance(module, ColumnParallelLinear):
        output = product(input_, added)
        if module.gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=module.tp_group)
        return output, returned
    output = reduce_from_tensor_model_parallel_region(product(input_), group=module.tp_group)
    return output if added is None else output + added, returned
