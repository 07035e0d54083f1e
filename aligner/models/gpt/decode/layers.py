"""Fast implementation of megatron-core's dense transformer layers, without gradients.

`IncrementalLayer` computes a layer with a third of the operations of its modules, on rows of one
token each. It supports aligner's local layers and those of Transformer Engine. Models with experts
or float32 residuals run their modules instead.

Shape legend: ``n`` rows, ``H`` hidden, ``G`` key-value heads, ``R`` query heads per key-value head,
``D`` head width, ``D_rot`` its rotated part. ``heads`` are [n, G, R + 2, D]: a key-value head's
queries, its key, its value.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from aligner.kernels.linear_product import GatedProduct, Product
from aligner.models.gpt.decode.kv_cache import KVCache
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.elementwise import Norm, rms_norm_rows


class Rotation(NamedTuple):
    """Cosines and sines of rotary embedding for all heads, one row per position or per token.

    ``cos``: float [n, 1, R + 2, D], 1 in columns without rotation. ``sin``: the same shape, 0 in
    columns without rotation and negative in the first half of ``D_rot``. ``half``: ``D_rot / 2``.
    """

    cos: Tensor
    sin: Tensor
    half: int

    @classmethod
    def table(
        cls, angles: Tensor, queries: int, head_dim: int, dtype: torch.dtype, factor: float
    ) -> "Rotation":
        """Build one row for each position from ``angles``, float [positions, 1, 1, D_rot].

        ``queries``: R. ``factor``: number that multiplies the rotated columns.
        """
        # For all positions, because a CPU's vector and scalar cosine differ in the last bit.
        half = angles.shape[-1] // 2
        shape = (angles.shape[0], 1, queries + 2, head_dim)
        cos = torch.ones(shape, dtype=dtype, device=angles.device)
        sin = torch.zeros_like(cos)
        cos[:, :, :-1, : 2 * half] = angles.cos()  # the value is not rotated
        sin[:, :, :-1, : 2 * half] = angles.sin()
        if factor != 1.0:
            for table in (cos, sin):
                table[:, :, :-1, : 2 * half] *= factor
        sin[..., :half].neg_()
        return cls(cos, sin, half)

    def at(self, positions: Tensor) -> "Rotation":
        """Select the row of each position, int64 [n]."""
        return self._replace(cos=self.cos[positions], sin=self.sin[positions])

    def apply(self, heads: Tensor) -> Tensor:
        """Return ``heads``, float [n, G, R + 2, D], with rotary embedding applied, contiguous."""
        if heads.shape[-1] == 2 * self.half:
            swapped = heads.roll(self.half, dims=-1)
        else:
            first, second, unrotated = heads.tensor_split((self.half, 2 * self.half), dim=-1)
            swapped = torch.cat((second, first, unrotated), dim=-1)
        return (heads * self.cos).addcmul_(swapped, self.sin)


class IncrementalLayer:
    """One transformer layer, applied to rows [n, H] of one token each."""

    def __init__(
        self,
        layer: TransformerLayer,
        products: Mapping[nn.Module, Product],
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._number: int = attention.core_attention.layer_number
        skipped = layer.config.no_rope_freq
        self._rotates = not (skipped and skipped[layer.layer_number - 1])
        self._groups: int = attention.num_query_groups_per_partition
        self._head_dim: int = attention.hidden_size_per_attention_head
        self._tp_group = tp_group
        # Transformer Engine's linears contain the norm before them.
        self._input_norm = _norm_before(attention.linear_qkv, layer.input_layernorm)
        self._mlp_norm = _norm_before(mlp.linear_fc1, layer.pre_mlp_layernorm)
        self._query_norm = _norm_or_none(attention.q_layernorm)
        self._key_norm = _norm_or_none(attention.k_layernorm)
        self._qkv, self._qkv_bias = _parameters(attention.linear_qkv, products)
        self._proj, self._proj_bias = _parameters(attention.linear_proj, products)
        self._fc1, self._fc1_bias = _parameters(mlp.linear_fc1, products)
        self._fc2, self._fc2_bias = _parameters(mlp.linear_fc2, products)
        self._activation: Callable[[Tensor], Tensor] = mlp.config.activation_func
        self._gated: bool = mlp.config.gated_linear_unit
        # SwiGLU without a bias is fused into the products.
        self._swiglu: GatedProduct | None = None
        if self._gated and self._activation is F.silu and self._fc1_bias is None:
            self._swiglu = GatedProduct(self._fc1.weight)

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        cache: KVCache,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer for ``hidden`` [n, H], and store keys and values in ``cache``.

        ``selected``: int64 [m], indices of rows. The result is [m, H]. Default: all rows.
        """
        mixed = self._qkv(self._input_norm(hidden), self._qkv_bias)
        heads = mixed.view(hidden.shape[0], self._groups, -1, self._head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(heads[:, :, :-2]), self._key_norm(heads[:, :, -2:-1])
            heads = torch.cat((query, key, heads[:, :, -1:]), dim=2)
        if rotation is None or not self._rotates:
            heads = heads.contiguous()
        else:
            heads = rotation.apply(heads)
        attended = cache.attend_rows(self._number, heads)
        if selected is not None:
            attended, hidden = attended[selected], hidden[selected]
        hidden = self._add(hidden, self._proj, attended, self._proj_bias)
        inner = self._inner(self._mlp_norm(hidden))
        return self._add(hidden, self._fc2, inner, self._fc2_bias)

    def _add(self, hidden: Tensor, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``hidden + x @ weight^T + bias``, with products summed over tensor ranks."""
        if self._tp_group is None:
            hidden = product.added_to(hidden, x)
        else:
            part = product(x)
            dist.all_reduce(part, group=self._tp_group)
            hidden = part.add_(hidden)
        if bias is not None:
            hidden += bias
        return hidden

    def _inner(self, normal: Tensor) -> Tensor:
        if self._swiglu is not None:
            return self._swiglu(normal)
        inner = self._fc1(normal, self._fc1_bias)
        if not self._gated:
            return self._activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


def incremental_layers(
    gpt: GPTModel, products: Mapping[nn.Module, Product]
) -> list[IncrementalLayer] | None:
    """Return the fast layers of a model, or None if one of its layers is not supported."""
    layers = list(gpt.decoder.layers)
    config = gpt.config
    has_option = config.fp32_residual_connection or config.rotary_interleaved
    has_option = has_option or config.attention_output_gate or config.window_rotary_base is not None
    if has_option or not all(_is_supported(layer, products) for layer in layers):
        return None
    group = gpt.pg_collection.tp
    tp_group = group if dist.get_world_size(group) > 1 else None
    return [IncrementalLayer(layer, products, tp_group) for layer in layers]


def is_transformer_engine(module: nn.Module) -> bool:
    """Return whether the module's class is from Transformer Engine or derived from such a class."""
    return any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__)


def _is_supported(layer: nn.Module, products: Mapping[nn.Module, Product]) -> bool:
    """Return whether the layer is dense, with aligner's or Transformer Engine's modules."""
    if type(layer) is not TransformerLayer or not isinstance(layer.self_attention, SelfAttention):
        return False
    attention, mlp = layer.self_attention, layer.mlp
    is_dense = type(mlp) is MLP and type(attention.core_attention) is CoreAttention
    if not is_dense or isinstance(layer.self_attn_bda, nn.Module):
        return False
    norms = (
        (attention.linear_qkv, layer.input_layernorm),
        (mlp.linear_fc1, layer.pre_mlp_layernorm),
    )
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    # Norms are ours or inside Transformer Engine's linears, whose weights must not be 8-bit.
    return all(
        type(norm) is Norm or (isinstance(norm, IdentityOp) and _norm_inside(linear))
        for linear, norm in norms
    ) and all(
        linear in products
        or (
            is_transformer_engine(linear)
            and type(getattr(linear, "weight", None)) in (nn.Parameter, Tensor)
        )
        for linear in linears
    )


def _norm_inside(linear: nn.Module) -> bool:
    return is_transformer_engine(linear) and hasattr(linear, "layer_norm_weight")


def _norm_before(linear: nn.Module, norm: nn.Module) -> Callable[[Tensor], Tensor]:
    if not _norm_inside(linear):
        return fast_norm(norm)
    weight, bias = linear.layer_norm_weight.detach(), linear.layer_norm_bias
    if linear.zero_centered_gamma:
        weight = weight + 1
    options = {"normalized_shape": weight.shape, "weight": weight, "eps": linear.eps}
    if linear.normalization == "RMSNorm":
        return functools.partial(F.rms_norm, **options)
    return functools.partial(F.layer_norm, bias=bias.detach(), **options)


def _parameters(
    linear: nn.Module, products: Mapping[nn.Module, Product]
) -> tuple[Product, Tensor | None]:
    """Return weight and bias. Transformer Engine represents a missing bias by an empty tensor."""
    product = products[linear] if linear in products else Product(linear.weight)
    bias = linear.bias
    return product, None if bias is None or bias.numel() == 0 else bias.detach()


def _norm_or_none(norm: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    return None if norm is None or isinstance(norm, IdentityOp) else norm


def fast_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return ``norm``, or for float32 RMSNorm an equal function with fewer operations."""
    plain = type(norm) is Norm and norm.is_rms and not norm.zero_centered
    if not plain or norm.weight.dtype != torch.float32:
        return norm
    return functools.partial(rms_norm_rows, weight=norm.weight.detach(), eps=norm.eps)
