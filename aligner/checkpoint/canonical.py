"""Canonical weights: the common form of weights in all files and models.

Canonical weights map megatron-core's names, without ``model.`` and with global layer numbers, to
tensors that are neither split nor padded. The rows of the fused QKV projection are grouped by query
group: its query heads, its key, its value (``kv_channels`` rows each). The first linear of a gated
MLP has the rows ``[gate; up]``. In latent attention, the rotated rows of a head come first.
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
LORA = ".lora"  # suffix of an adapter's name after the name of its linear layer
LORA_A, LORA_B = f"{LORA}.a", f"{LORA}.b"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")  # index of the layer, rest of the name
EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")  # index of the expert
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
# Buffers and engine state that no model needs.
_IGNORED = re.compile(r"_extra_state|rotary_pos_emb|(^|\.)inv_freq$|core_attention(?!\.softmax)")
_PREFIX = re.compile(r"^(model\.)?(module\.)*(?=\D)")


class LazyTensors(Mapping[str, Tensor]):
    """Mapping of ``names``, in this order, to tensors that are read when they are indexed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def canonical_name(key: str) -> str | None:
    """Return the canonical name for a state dict's key, or None if it is the key of no weight."""
    if _IGNORED.search(key):
        return None
    name = _PREFIX.sub("", key, count=1)
    for old, new in _LEGACY + _TRANSFORMER_ENGINE:
        name = name.replace(old, new)
    return name


def expected_shapes(architecture: GPTArchitecture) -> dict[str, Shape]:
    """Return the canonical name and global shape of every tensor, from first to last layer.

    Raises `CheckpointError` for a model family that has no canonical form.
    """
    if not architecture.has_table:
        raise CheckpointError(
            f"model_type={architecture.family!r} is not supported for adapters, `aligner plan` and "
            ".nemo files. Give a model of a family that docs/checkpoints.md lists"
        )
    hidden = architecture.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (architecture.vocab_size, hidden)}
    if architecture.position_embedding == "learned_absolute":
        positions = architecture.max_position_embeddings
        shapes["embedding.position_embeddings.weight"] = (positions, hidden)
    dense = architecture.layers_without_experts
    layers = [dict(_layer_shapes(architecture, is_dense)) for is_dense in (False, True)]
    for index in range(architecture.num_layers):
        layer = layers[index in dense]
        shapes |= {f"decoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= dict(_norm("decoder.final_layernorm", hidden, architecture))
    if not architecture.tie_embeddings:
        shapes[OUTPUT_LAYER] = (architecture.vocab_size, hidden)
    return shapes


def _layer_shapes(architecture: GPTArchitecture, is_dense: bool) -> Iterator[tuple[str, Shape]]:
    hidden, head = architecture.hidden_size, architecture.kv_channels
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    norms = architecture.branch_norms  # position: "before", "after" or "both"
    # Attention input: its norm, and the projections to query, key and value.
    if norms != "after":
        yield from _norm("input_layernorm", hidden, architecture)
    qkv_bias = architecture.bias_linear or architecture.bias_qkv
    if architecture.kv_lora_rank is None:
        yield from _linear(
            "self_attention.linear_qkv", (heads + 2 * groups) * head, hidden, bias=qkv_bias
        )
    else:
        yield from _latent_shapes(architecture, architecture.kv_lora_rank)
    if architecture.qk_norm_over_heads:
        yield "self_attention.q_layernorm.all_heads.weight", (heads * head,)
        yield "self_attention.k_layernorm.all_heads.weight", (groups * head,)
    elif architecture.qk_layernorm:
        yield from _norm("self_attention.q_layernorm", head, architecture)
        yield from _norm("self_attention.k_layernorm", head, architecture)
    # Attention output and the norms after it.
    bias = architecture.bias_linear
    columns = heads * (architecture.value_channels or head)
    yield from _linear("self_attention.linear_proj", hidden, columns, bias=bias)
    if architecture.attention_sinks:
        yield "self_attention.core_attention.softmax_offset", (heads,)
    if norms != "before":
        yield from _norm("self_attn_bda.norm", hidden, architecture)
        yield from _norm("mlp_bda.norm", hidden, architecture)
    if norms != "after":
        yield from _norm("pre_mlp_layernorm", hidden, architecture)
    if architecture.num_moe_experts is None or is_dense:
        yield from _mlp("mlp", architecture.ffn_hidden_size, architecture)
        return
    # Experts replace the MLP.
    shared_size = architecture.moe_shared_expert_size
    if shared_size is not None:
        yield from _mlp("mlp.shared_experts", shared_size, architecture)
        if architecture.moe_shared_expert_gate:
            yield "mlp.shared_experts.gate_weight", (1, hidden)
    yield from _linear("mlp.router", architecture.num_moe_experts, hidden, bias=bias)
    if architecture.moe_router_sigmoid:
        yield "mlp.router.expert_bias", (architecture.num_moe_experts,)
    for expert in range(architecture.num_moe_experts):
        prefix = f"mlp.experts.local_experts.{expert}"
        yield from _mlp(prefix, architecture.expert_ffn_hidden_size, architecture)


def _latent_shapes(architecture: GPTArchitecture, rank: int) -> Iterator[tuple[str, Shape]]:
    hidden, head = architecture.hidden_size, architecture.kv_channels
    heads, rotated = architecture.num_attention_heads, architecture.rotated_channels
    prefix, query_rank = "self_attention.linear_", architecture.q_lora_rank
    if query_rank is None:
        yield f"{prefix}q_proj.weight", (heads * head, hidden)
    else:
        yield f"{prefix}q_down_proj.weight", (query_rank, hidden)
        yield "self_attention.q_layernorm.weight", (query_rank,)
        yield f"{prefix}q_up_proj.weight", (heads * head, query_rank)
    yield f"{prefix}kv_down_proj.weight", (rank + rotated, hidden)
    yield "self_attention.kv_layernorm.weight", (rank,)
    width = head - rotated + (architecture.value_channels or head)
    yield f"{prefix}kv_up_proj.weight", (heads * width, rank)


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
    if not architecture.normalization.startswith("rmsnorm"):
        yield f"{prefix}.bias", (size,)


def check_names(names: Iterable[str], architecture: GPTArchitecture, source: str) -> None:
    """Raise `CheckpointError` if canonical ``names`` are missing or unexpected.

    An output layer and a reward head are never unexpected. If there is a reward head, the output
    layer may be missing. ``source``: name of the checkpoint, for the error.
    """
    actual, expected = set(names), set(expected_shapes(architecture))
    if REWARD_HEAD[0] in actual:
        expected.discard(OUTPUT_LAYER)
    problems = misfits(actual, expected, {OUTPUT_LAYER, *REWARD_HEAD})
    if problems:
        raise CheckpointError(
            f"weights in {source} do not fit its configuration: {problems}. "
            "Check num_layers, bias, normalization and the activation in model_config.yaml"
        )


def misfits(actual: Set[str], expected: Set[str], optional: Set[str]) -> str:
    """Return a text about missing and unexpected names, or "". ``optional`` names may be absent."""
    problems, limit = [], 6
    unexpected = actual - expected - optional
    for kind, names in (("missing", expected - actual), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            problems.append(f"{kind} {', '.join(sorted(names)[:limit])}{more}")
    return "; ".join(problems)


def check_shape(name: str, actual: Iterable[int], expected: Shape) -> None:
    """Raise `CheckpointError` if the ``actual`` shape of a tensor is not the ``expected`` shape."""
    if tuple(actual) != expected:
        raise CheckpointError(
            f"{name} has shape {list(actual)}, but the architecture gives {list(expected)}. The "
            "weights belong to another model"
        )


def split_axis(name: str) -> int | None:
    """Return the axis along which tensor parallelism splits a tensor, or None if it is unsplit.

    Of an adapter, matrix B is split if the weight's outputs are split. Otherwise A is split.
    """
    by_outputs = (
        *(".linear_qkv.", ".linear_fc1.", ".all_heads.", "_up_proj.", ".linear_q_proj."),
        ".softmax_offset",
    )
    if name in _VOCABULARY or any(part in name for part in by_outputs):
        return None if name.endswith(LORA_A) else 0
    is_row_parallel = ".linear_proj." in name or ".linear_fc2." in name
    is_matrix = name.endswith((".weight", LORA_A))
    return 1 if (is_row_parallel or name == REWARD_HEAD[0]) and is_matrix else None


def split(
    name: str, tensor: Tensor, architecture: GPTArchitecture, tp_rank: int, tp_size: int
) -> Tensor:
    """Return this rank's part of a global tensor [out, in] or [out], as a view if possible.

    QKV is cut between query groups. Gate and up of a gated MLP are split separately, so a part is
    ``[gate part; up part]``. The vocabulary is first padded with zero rows to
    `GPTArchitecture.padded_vocab_size`. Raises `LayoutError` if ``tp_size`` does not divide the
    axis.
    """
    if name in _VOCABULARY:
        rows = architecture.padded_vocab_size(tp_size) - tensor.shape[0]
        tensor = F.pad(tensor, (0, 0, 0, rows)) if rows else tensor
    # Check that the ranks' parts have equal sizes, then cut.
    axis = split_axis(name)
    if axis is None or tp_size == 1:
        return tensor
    units = architecture.num_query_groups if ".linear_qkv." in name else tensor.shape[axis]
    if units % tp_size:
        raise LayoutError(
            f"{name}: {units} {'query groups' if units != tensor.shape[axis] else 'rows'} cannot "
            f"be divided by model.tensor_model_parallel_size={tp_size}. Choose a divisor of {units}"
        )
    if ".linear_fc1." in name and architecture.gated:
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp_size, dim=axis)[tp_rank]


def merge(name: str, parts: list[Tensor], architecture: GPTArchitecture) -> Tensor:
    """Join the parts of all tensor-parallel ranks. Inverse of `split`.

    ``parts``: tensors of equal shape and dtype in rank order, [out / tp, in] or [out, in / tp].
    Returns the global tensor [out, in], without the rows that pad the vocabulary.
    """
    axis = split_axis(name)
    is_unsplit_head = name == REWARD_HEAD[0] and parts[0].shape[1] == architecture.hidden_size
    if len(parts) == 1 or axis is None or is_unsplit_head:  # NeMo may have split the head
        tensor = parts[0]
    elif ".linear_fc1." in name and architecture.gated:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        tensor = torch.cat([torch.cat(half) for half in halves])
    else:
        tensor = torch.cat(parts, dim=axis)
    # Remove the padding of the vocabulary.
    if name not in _VOCABULARY:
        return tensor
    if tensor.shape[0] < architecture.vocab_size:
        raise CheckpointError(
            f"{name} has {tensor.shape[0]} rows, fewer than the tokenizer's "
            f"{architecture.vocab_size} tokens. The tokenizer belongs to another model"
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
    """Find each row (or column) of this rank's part in a file with another tensor-parallel size.

    The file has ``count`` parts of shape ``shape``, with ``s`` rows each. Returns int64 ``[n]`` for
    the n rows of this rank's part: ``part * s + row``, where row ``row`` of the file's part
    ``part`` has the values. Rows that pad the vocabulary have -1.
    """
    axis = split_axis(name)
    assert axis is not None
    size = shape[axis]
    form = [size if dim == axis else 1 for dim in range(len(shape))]
    # Count from 1, because `split` pads with 0.
    indices = [torch.arange(1, size + 1).add(part * size).view(form) for part in range(count)]
    merged = merge(name, indices, architecture)
    return split(name, merged, architecture, tp_rank, tp_size).reshape(-1) - 1


def runs_of_rows(origin: Tensor, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of rows that are adjacent in one part of the file. Padding rows are skipped.

    A run is (first row, index of the file's part, first row in that part, number of rows).
    ``origin``: int64 [n], result of `origin_of_rows`. ``size``: number of rows of a file's part.
    """
    part = torch.div(origin, size, rounding_mode="floor")
    is_adjacent = (origin.diff() == 1) & (part.diff() == 0)
    edges = [0, *((~is_adjacent).nonzero().view(-1) + 1).tolist(), len(origin)]
    for first, end in itertools.pairwise(edges):
        if first < end and (row := int(origin[first])) >= 0:
            yield first, row // size, row % size, end - first
