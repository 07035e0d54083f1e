"""Canonical weights: the form in which weights travel between files and models.

Canonical weights are a mapping from megatron-core's local-spec names, without ``model.`` and with
global layer numbers, to global tensors: not split over tensor-parallel ranks, the vocabulary not
padded. Every reader produces it, every writer and every model layout is derived from it.

Layouts inside tensors are megatron-core's: fused QKV interleaves per query group (the group's
query heads, its key, its value, ``kv_channels`` rows each), gated fc1 is ``[gate; up]``.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.errors import CheckpointError, LayoutError

Weights = Mapping[str, Tensor]
Shape = tuple[int, ...]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
REWARD_HEAD = ("rm_head.weight", "rm_head.bias")
LORA_A, LORA_B = ".lora.a", ".lora.b"  # what an adapter's matrices add to their linear's name
_VOCABULARY = (EMBEDDING, OUTPUT_LAYER)

_LEGACY = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.", "decoder."),
    ("language_model.output_layer.", "output_layer."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
)
_TRANSFORMER_ENGINE = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
# Buffers and engine state that carry nothing a model needs.
_IGNORED = re.compile(r"_extra_state|rotary_pos_emb|(^|\.)inv_freq$|core_attention")
_PREFIX = re.compile(r"^(model\.)?(module\.)*(?=\D)")


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read when they are indexed; ``names`` are theirs, in order."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def canonical_name(key: str) -> str | None:
    """Canonical form of a checkpoint key or parameter name; None for what is to be ignored.

    Understands the ``model.`` and ``model.module.`` prefixes, Transformer Engine's norm names and
    the ``language_model`` names of files older than megatron-core. Layer numbers are kept.
    """
    if _IGNORED.search(key):
        return None
    name = _PREFIX.sub("", key, count=1)
    for old, new in _LEGACY + _TRANSFORMER_ENGINE:
        name = name.replace(old, new)
    return name


def expected_shapes(architecture: GPTArchitecture) -> dict[str, Shape]:
    """Name and global shape of every tensor of the model, in depth order."""
    hidden = architecture.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (architecture.vocab_size, hidden)}
    if architecture.position_embedding == "learned_absolute":
        positions = architecture.max_position_embeddings
        shapes["embedding.position_embeddings.weight"] = (positions, hidden)
    layer = dict(_layer_shapes(architecture))
    for number in range(architecture.num_layers):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes |= dict(_norm("decoder.final_layernorm", hidden, architecture))
    if not architecture.tie_embeddings:
        shapes[OUTPUT_LAYER] = (architecture.vocab_size, hidden)
    return shapes


def _layer_shapes(architecture: GPTArchitecture) -> Iterator[tuple[str, Shape]]:
    hidden, head = architecture.hidden_size, architecture.kv_channels
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    yield from _norm("input_layernorm", hidden, architecture)
    qkv_bias = architecture.bias_linear or architecture.bias_qkv
    yield from _linear(
        "self_attention.linear_qkv", (heads + 2 * groups) * head, hidden, bias=qkv_bias
    )
    if architecture.qk_layernorm:
        yield from _norm("self_attention.q_layernorm", head, architecture)
        yield from _norm("self_attention.k_layernorm", head, architecture)
    bias = architecture.bias_linear
    yield from _linear("self_attention.linear_proj", hidden, heads * head, bias=bias)
    yield from _norm("pre_mlp_layernorm", hidden, architecture)
    if architecture.num_moe_experts is None:
        yield from _mlp("mlp", architecture.ffn_hidden_size, architecture)
        return
    yield from _linear("mlp.router", architecture.num_moe_experts, hidden, bias=bias)
    for expert in range(architecture.num_moe_experts):
        prefix = f"mlp.experts.local_experts.{expert}"
        yield from _mlp(prefix, architecture.expert_ffn_hidden_size, architecture)


def _mlp(prefix: str, ffn_size: int, architecture: GPTArchitecture) -> Iterator[tuple[str, Shape]]:
    hidden, bias = architecture.hidden_size, architecture.bias_linear
    rows = ffn_size * (2 if architecture.gated else 1)
    yield from _linear(f"{prefix}.linear_fc1", rows, hidden, bias=bias)
    yield from _linear(f"{prefix}.linear_fc2", hidden, ffn_size, bias=bias)


def _linear(prefix: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (rows, columns)
    if bias:
        yield f"{prefix}.bias", (rows,)


def _norm(prefix: str, size: int, architecture: GPTArchitecture) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (size,)
    if architecture.normalization != "rmsnorm":
        yield f"{prefix}.bias", (size,)


def check_names(names: Iterable[str], architecture: GPTArchitecture, source: str) -> None:
    """Refuse weights that lack a tensor of the model or bring one it does not have.

    An output layer beside tied embeddings and a reward head are always welcome; with a reward
    head the output layer may be gone.
    """
    found, expected = set(names), set(expected_shapes(architecture))
    if REWARD_HEAD[0] in found:
        expected.discard(OUTPUT_LAYER)
    problems = misfits(found, expected, {OUTPUT_LAYER, *REWARD_HEAD})
    if problems:
        raise CheckpointError(
            f"weights in {source} do not fit its configuration: {problems}; "
            "check num_layers, bias, normalization and the activation in model_config.yaml"
        )


def misfits(found: Set[str], expected: Set[str], welcome: Set[str]) -> str:
    """Names that are missing, and unexpected ones that are not ``welcome``, in words."""
    problems, limit = [], 6
    for kind, names in (("missing", expected - found), ("unexpected", found - expected - welcome)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            problems.append(f"{kind} {', '.join(sorted(names)[:limit])}{more}")
    return "; ".join(problems)


def check_shape(name: str, actual: Iterable[int], expected: Shape) -> None:
    """Refuse a tensor of another shape than the architecture gives it."""
    if tuple(actual) != expected:
        raise CheckpointError(
            f"{name} has shape {list(actual)}, the architecture gives {list(expected)}"
        )


def split_axis(name: str) -> int | None:
    """Axis along which tensor parallelism splits a tensor; None: every rank has all of it.

    An adapter's matrices: B like the weight where the outputs are split, A where the inputs are.
    """
    if name in _VOCABULARY or ".linear_qkv." in name or ".linear_fc1." in name:
        return None if name.endswith(LORA_A) else 0
    is_row_parallel = ".linear_proj." in name or ".linear_fc2." in name
    is_matrix = name.endswith((".weight", LORA_A))
    return 1 if (is_row_parallel or name == REWARD_HEAD[0]) and is_matrix else None


def split(
    name: str, tensor: Tensor, architecture: GPTArchitecture, tp_rank: int, tp_size: int
) -> Tensor:
    """This rank's part of a global tensor [out, in] or [out] of any dtype (a view where possible).

    QKV is cut between query groups, gated fc1 into ``[gate_r; up_r]``; the vocabulary is first
    padded with zero rows to what all ranks can share.
    """
    if name in _VOCABULARY:
        rows = architecture.padded_vocab_size(tp_size) - tensor.shape[0]
        tensor = F.pad(tensor, (0, 0, 0, rows)) if rows else tensor
    axis = split_axis(name)
    if axis is None or tp_size == 1:
        return tensor
    units = architecture.num_query_groups if ".linear_qkv." in name else tensor.shape[axis]
    if units % tp_size:
        raise LayoutError(
            f"{name}: {units} {'query groups' if units != tensor.shape[axis] else 'rows'} cannot "
            f"be shared by model.tensor_model_parallel_size={tp_size}; choose a divisor"
        )
    if ".linear_fc1." in name and architecture.gated:
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp_size, dim=axis)[tp_rank]


def merge(name: str, parts: list[Tensor], architecture: GPTArchitecture) -> Tensor:
    """Inverse of `split` over the parts of all tensor-parallel ranks in order.

    ``parts``: of one shape and dtype, [out / tp, in] or [out, in / tp], by the axis that
    `split_axis` gives for ``name``. Returns the whole tensor [out, in], without padding rows.
    """
    axis = split_axis(name)
    whole_head = name == REWARD_HEAD[0] and parts[0].shape[1] == architecture.hidden_size
    if len(parts) == 1 or axis is None or whole_head:  # heads are split by NeMo, not by us
        tensor = parts[0]
    elif ".linear_fc1." in name and architecture.gated:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        tensor = torch.cat([torch.cat(half) for half in halves])
    else:
        tensor = torch.cat(parts, dim=axis)
    if name not in _VOCABULARY:
        return tensor
    if tensor.shape[0] < architecture.vocab_size:
        raise CheckpointError(
            f"{name} has {tensor.shape[0]} rows, fewer than the tokenizer's "
            f"{architecture.vocab_size} tokens; the tokenizer belongs to another model"
        )
    return tensor[: architecture.vocab_size]


def origin_of_rows(
    name: str,
    shape: Sequence[int],
    count: int,
    architecture: GPTArchitecture,
    *,
    tp_rank: int,
    tp_size: int,
) -> Tensor:
    """Origin of each row (or column) of this rank's part, among ``count`` parts of ``shape``.

    ``name`` is that of a tensor which is split along an axis. Returns int64 ``[n]``: old part times
    its size along that axis, plus the place in it; -1: padding. The rules of `merge` and `split`
    are applied to the numbers of rows instead of rows.
    """
    axis = split_axis(name)
    assert axis is not None
    size = shape[axis]
    one = [size if dim == axis else 1 for dim in range(len(shape))]
    numbers = [torch.arange(1, size + 1).add(old * size).view(one) for old in range(count)]
    whole = merge(name, numbers, architecture)
    return split(name, whole, architecture, tp_rank, tp_size).reshape(-1) - 1


def runs_of_rows(origin: Tensor, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of adjacent rows: (first now, part, first in the part, how many).

    ``origin``: int64 [n], see `origin_of_rows`. ``size``: that of a part along the split axis.
    Padding belongs to no run.
    """
    part = torch.div(origin, size, rounding_mode="floor")
    together = (origin.diff() == 1) & (part.diff() == 0)
    edges = [0, *((~together).nonzero().view(-1) + 1).tolist(), len(origin)]
    for first, end in itertools.pairwise(edges):
        if first < end and (number := int(origin[first])) >= 0:
            yield first, number // size, number % size, end - first
