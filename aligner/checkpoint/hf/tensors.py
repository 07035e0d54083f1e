"""Tables that map canonical modules to Hugging Face modules and the layout of their tensors."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
from aligner.errors import CheckpointError, raised_as


@dataclass(frozen=True)
class Layout:
    """Conversion between one canonical tensor and its Hugging Face tensors.

    ``join`` converts the Hugging Face tensors to the canonical tensor, and ``part`` is its inverse.
    Weights are [out, in] and biases [out], of any dtype.
    """

    join: Callable[[list[Tensor], GPTArchitecture], Tensor]
    part: Callable[[Tensor, GPTArchitecture], list[Tensor]]
    transposed: bool = False  # Hugging Face's weights are [in, out]


def _conv(tensor: Tensor) -> Tensor:
    """Transpose a weight, because GPT-2's Conv1D stores ``[in, out]``. Biases are unchanged."""
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor


def join_qkv(parts: list[Tensor], architecture: GPTArchitecture) -> Tensor:
    """Join query ``[heads * D, …]``, key and value ``[groups * D, …]`` to one tensor.

    The rows of a query group are adjacent: its query heads, its key, its value. Returns
    ``[(heads + 2 * groups) * D, …]`` for head width D.
    """
    groups = architecture.num_query_groups
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def part_qkv(tensor: Tensor, architecture: GPTArchitecture) -> list[Tensor]:
    """Split ``[(heads + 2 * groups) * D, …]`` into query, key and value. Inverse of `join_qkv`."""
    groups, head = architecture.num_query_groups, architecture.kv_channels
    queries = architecture.num_attention_heads // groups * head
    grouped = tensor.reshape(groups, queries + 2 * head, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([queries, head, head], dim=1)]


def _join_fused_qkv(fused: Tensor, architecture: GPTArchitecture) -> Tensor:
    rows = [architecture.num_attention_heads, *[architecture.num_query_groups] * 2]
    sizes = [count * architecture.kv_channels for count in rows]
    if fused.shape[0] != sum(sizes):
        raise CheckpointError(
            f"the projection to query, key and value has {fused.shape[0]} outputs, but config.json "
            f"gives {sum(sizes)}. Correct num_attention_heads or num_key_value_heads"
        )
    return join_qkv(list(fused.split(sizes)), architecture)


def _rotated_order(architecture: GPTArchitecture) -> Tensor:
    """Return int64 [D], an order of a head's D channels: even rotated, odd rotated, unrotated.

    A file's RoPE rotates adjacent channels. In this order, it rotates channel i with i + half.
    """
    width = architecture.kv_channels
    rotated = architecture.rotated_channels
    columns = torch.arange(width)
    return torch.cat((columns[:rotated:2], columns[1:rotated:2], columns[rotated:]))


def _reorder(tensor: Tensor, order: Tensor) -> Tensor:
    """Apply ``order``, int64 [D], to the rows of each block of D rows."""
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def _reorder_qk(parts: list[Tensor], order: Tensor) -> list[Tensor]:
    """Apply ``order`` to the rows of each head of query and key. The value is unchanged."""
    return [*(_reorder(part, order) for part in parts[:-1]), parts[-1]]


_COPY = Layout(lambda parts, _: parts[0], lambda tensor, _: [tensor])
_CONV = Layout(lambda parts, _: _conv(parts[0]), lambda tensor, _: [_conv(tensor)], True)
_QKV = Layout(join_qkv, part_qkv)
_CONV_QKV = Layout(
    lambda parts, arch: _join_fused_qkv(_conv(parts[0]), arch),
    lambda tensor, arch: [_conv(torch.cat(part_qkv(tensor, arch)))],
    True,
)
_GATE_UP = Layout(lambda parts, _: torch.cat(parts), lambda tensor, _: list(tensor.chunk(2)))

# Transposed, with rows of gate and up in turns.
_TURNS = Layout(
    lambda parts, _: torch.cat([_conv(parts[0])[turn::2] for turn in range(2)]),
    lambda tensor, _: [_conv(torch.stack(tensor.chunk(2), 1).flatten(0, 1))],
    True,
)

# A source that ends with {b} has the ending "" for weights and "_bias" for biases. Experts whose
# source has no {e} are stacked in one tensor.
Table = Mapping[str, tuple[Layout, tuple[str, ...]]]

_L, _H = "decoder.layers.{n}", "model.layers.{n}"
_ATTENTION, _MLP = f"{_H}.self_attn", f"{_H}.mlp"
_SEPARATE_QKV = (f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj")
LLAMA_TABLE: Table = {
    "embedding.word_embeddings": (_COPY, ("model.embed_tokens",)),
    f"{_L}.input_layernorm": (_COPY, (f"{_H}.input_layernorm",)),
    f"{_L}.self_attention.linear_qkv": (_QKV, _SEPARATE_QKV),
    f"{_L}.self_attention.q_layernorm": (_COPY, (f"{_ATTENTION}.q_norm",)),
    f"{_L}.self_attention.k_layernorm": (_COPY, (f"{_ATTENTION}.k_norm",)),
    f"{_L}.self_attention.linear_proj": (_COPY, (f"{_ATTENTION}.o_proj",)),
    f"{_L}.pre_mlp_layernorm": (_COPY, (f"{_H}.post_attention_layernorm",)),
    f"{_L}.mlp.linear_fc1": (_GATE_UP, (f"{_MLP}.gate_proj", f"{_MLP}.up_proj")),
    f"{_L}.mlp.linear_fc2": (_COPY, (f"{_MLP}.down_proj",)),
    "decoder.final_layernorm": (_COPY, ("model.norm",)),
    "output_layer": (_COPY, ("lm_head",)),
}
# Rows that replace rows of Llama's table.
INTERLEAVED_ROPE: Table = {
    f"{_L}.self_attention.linear_qkv": (
        Layout(
            lambda parts, arch: join_qkv(_reorder_qk(parts, _rotated_order(arch)), arch),
            lambda tensor, arch: _reorder_qk(
                part_qkv(tensor, arch), _rotated_order(arch).argsort()
            ),
        ),
        _SEPARATE_QKV,
    )
}


def _rotated_last(width: Callable[[GPTArchitecture], int]) -> Layout:
    """Return the layout of a weight whose blocks of ``width`` rows end with the rows for RoPE.

    RoPE rotates adjacent rows of the file. A canonical block begins with the rotated rows, first
    the even and then the odd ones.
    """

    def order(architecture: GPTArchitecture) -> Tensor:
        fixed = width(architecture) - architecture.rotated_channels
        rows = torch.arange(width(architecture))
        return torch.cat((rows[fixed::2], rows[fixed + 1 :: 2], rows[:fixed]))

    return Layout(
        lambda parts, arch: _reorder(parts[0], order(arch)),
        lambda tensor, arch: [_reorder(tensor, order(arch).argsort())],
    )


_LATENT_QUERY = _rotated_last(lambda arch: arch.kv_channels)
_LATENTS = _rotated_last(lambda arch: (arch.kv_lora_rank or 0) + arch.rotated_channels)
LATENT_ATTENTION: Table = {
    f"{_L}.self_attention.linear_q_proj": (_LATENT_QUERY, (f"{_ATTENTION}.q_proj",)),
    f"{_L}.self_attention.linear_q_down_proj": (_COPY, (f"{_ATTENTION}.q_a_proj",)),
    f"{_L}.self_attention.q_layernorm": (_COPY, (f"{_ATTENTION}.q_a_layernorm",)),
    f"{_L}.self_attention.linear_q_up_proj": (_LATENT_QUERY, (f"{_ATTENTION}.q_b_proj",)),
    f"{_L}.self_attention.linear_kv_down_proj": (_LATENTS, (f"{_ATTENTION}.kv_a_proj_with_mqa",)),
    f"{_L}.self_attention.kv_layernorm": (_COPY, (f"{_ATTENTION}.kv_a_layernorm",)),
    f"{_L}.self_attention.linear_kv_up_proj": (_COPY, (f"{_ATTENTION}.kv_b_proj",)),
}
FUSED_QKV: Table = {
    f"{_L}.self_attention.linear_qkv": (
        Layout(
            lambda parts, arch: _join_fused_qkv(parts[0], arch),
            lambda tensor, arch: [torch.cat(part_qkv(tensor, arch))],
        ),
        (f"{_ATTENTION}.qkv_proj",),
    )
}
FUSED_GATE_UP: Table = {f"{_L}.mlp.linear_fc1": (_COPY, (f"{_MLP}.gate_up_proj",))}
UNGATED_MLP: Table = {f"{_L}.mlp.linear_fc1": (_COPY, (f"{_MLP}.up_proj",))}
STARCODER2_MLP: Table = {
    f"{_L}.mlp.linear_fc1": (_COPY, (f"{_MLP}.c_fc",)),
    f"{_L}.mlp.linear_fc2": (_COPY, (f"{_MLP}.c_proj",)),
}
ALL_HEADS_NORM: Table = {
    f"{_L}.self_attention.{kind}_layernorm.all_heads": (_COPY, (f"{_ATTENTION}.{kind}_norm",))
    for kind in ("q", "k")
}
_DENSE_MLP = (f"{_L}.mlp.linear_fc1", f"{_L}.mlp.linear_fc2")
# Kinds of parameters with other names in Hugging Face's files.
_KINDS = {"expert_bias": "e_score_correction_bias"}
_EXPERT = f"{_L}.mlp.experts.local_experts.{{e}}"


def norms_after(attention: str, mlp: str, before_mlp: str = "post_attention_layernorm") -> Table:
    """Return table rows for Hugging Face's norms after attention, after and before the MLP."""
    return {
        f"{_L}.pre_mlp_layernorm": (_COPY, (f"{_H}.{before_mlp}",)),
        f"{_L}.self_attn_bda.norm": (_COPY, (f"{_H}.{attention}",)),
        f"{_L}.mlp_bda.norm": (_COPY, (f"{_H}.{mlp}",)),
    }


def _experts_table(block: str, gate: str, up: str, down: str) -> Table:
    """Return Llama's table with the experts of module ``block`` in place of the MLP."""
    expert = f"{_H}.{block}.experts.{{e}}"
    dense = {module: row for module, row in LLAMA_TABLE.items() if module not in _DENSE_MLP}
    return {
        **dense,
        f"{_L}.mlp.router": (_COPY, (f"{_H}.{block}.gate",)),
        f"{_EXPERT}.linear_fc1": (_GATE_UP, (f"{expert}.{gate}", f"{expert}.{up}")),
        f"{_EXPERT}.linear_fc2": (_COPY, (f"{expert}.{down}",)),
    }


MIXTRAL_TABLE = _experts_table("block_sparse_moe", "w1", "w3", "w2")
QWEN3_MOE_TABLE = _experts_table("mlp", "gate_proj", "up_proj", "down_proj")


def _shared_expert(source: str) -> Table:
    return {
        f"{_L}.mlp.shared_experts.linear_fc1": (
            _GATE_UP,
            (f"{source}.gate_proj", f"{source}.up_proj"),
        ),
        f"{_L}.mlp.shared_experts.linear_fc2": (_COPY, (f"{source}.down_proj",)),
        f"{_L}.mlp.shared_experts.gate_weight": (_COPY, (f"{source}_gate",)),
    }


QWEN2_MOE_TABLE: Table = {**QWEN3_MOE_TABLE, **_shared_expert(f"{_MLP}.shared_expert")}
GLM4_MOE_TABLE: Table = {
    **LLAMA_TABLE,
    **QWEN3_MOE_TABLE,
    **_shared_expert(f"{_MLP}.shared_experts"),
}
GPT_OSS_TABLE: Table = {
    **MIXTRAL_TABLE,
    f"{_L}.self_attention.core_attention.softmax_offset": (_COPY, (f"{_ATTENTION}.sinks{{b}}",)),
    f"{_L}.mlp.router": (_COPY, (f"{_MLP}.router",)),
    f"{_EXPERT}.linear_fc1": (_TURNS, (f"{_MLP}.experts.gate_up_proj{{b}}",)),
    f"{_EXPERT}.linear_fc2": (_CONV, (f"{_MLP}.experts.down_proj{{b}}",)),
}
_G = "transformer.h.{n}"
GPT2_TABLE: Table = {
    "embedding.word_embeddings": (_COPY, ("transformer.wte",)),
    "embedding.position_embeddings": (_COPY, ("transformer.wpe",)),
    f"{_L}.input_layernorm": (_COPY, (f"{_G}.ln_1",)),
    f"{_L}.self_attention.linear_qkv": (_CONV_QKV, (f"{_G}.attn.c_attn",)),
    f"{_L}.self_attention.linear_proj": (_CONV, (f"{_G}.attn.c_proj",)),
    f"{_L}.pre_mlp_layernorm": (_COPY, (f"{_G}.ln_2",)),
    f"{_L}.mlp.linear_fc1": (_CONV, (f"{_G}.mlp.c_fc",)),
    f"{_L}.mlp.linear_fc2": (_CONV, (f"{_G}.mlp.c_proj",)),
    "decoder.final_layernorm": (_COPY, ("transformer.ln_f",)),
    "output_layer": (_COPY, ("lm_head",)),
}
# The scalar head of token and sequence classifiers.
SCORE = dict(zip(canonical.REWARD_HEAD, ("score.weight", "score.bias"), strict=True))
# Buffers that old transformers versions saved: causal masks and rope frequencies.
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def _row(name: str, table: Table) -> tuple[Layout, list[str]]:
    # The table has {n} and {e} in place of the numbers of layer and expert.
    layer, expert = canonical.LAYER.match(name), canonical.EXPERT.search(name)
    unnumbered = f"decoder.layers.{{n}}.{layer[2]}" if layer else name
    unnumbered = canonical.EXPERT.sub("{e}", unnumbered)
    module, _, kind = unnumbered.rpartition(".")
    if unnumbered in table:  # a parameter that is not called weight or bias
        module, kind = unnumbered, "weight"
    if module not in table:
        raise CheckpointError(f"the tensor {name} does not exist in this Hugging Face family")
    layout, sources = table[module]
    kind = _KINDS.get(kind, kind)
    if expert and "{e}" not in sources[0]:
        layout = _of_stack(layout, int(expert[1]))
    indices = {"n": layer and layer[1], "e": expert and expert[1]}
    indices["b"] = "" if kind == "weight" else f"_{kind}"
    names = [source.format(**indices) for source in sources]
    return layout, [n if "{b}" in s else f"{n}.{kind}" for s, n in zip(sources, names, strict=True)]


def _of_stack(layout: Layout, expert: int) -> Layout:
    """Return ``layout`` for one expert, whose Hugging Face tensors have a leading expert axis."""
    return Layout(
        lambda parts, arch: layout.join([parts[0][expert]], arch),
        lambda tensor, arch: [part[None] for part in layout.part(tensor, arch)],
    )


def part_rows(
    linear: str, rows: Tensor, table: Table, architecture: GPTArchitecture
) -> dict[str, Tensor]:
    """Split ``rows`` [outputs, …] of layer ``linear``. Returns Hugging Face module → its rows."""
    layout, names = _row(f"{linear}.weight", table)
    parts = layout.part(rows, architecture)
    return {
        name.removesuffix(".weight"): part.T if layout.transposed else part
        for name, part in zip(names, parts, strict=True)
    }


class HuggingFaceWeights(canonical.LazyTensors):
    """Canonical weights of a Hugging Face state dict. Its ``score`` layer is the reward head."""

    def __init__(
        self, state: canonical.Weights, table: Table, architecture: GPTArchitecture
    ) -> None:
        self._state, self._architecture = state, architecture
        self._shapes = canonical.expected_shapes(architecture)
        heads = {name: target for name, target in SCORE.items() if target in state}
        if heads:
            self._shapes.pop(canonical.OUTPUT_LAYER, None)
        self._rows = {name: _row(name, table) for name in self._shapes}
        self._rows |= {name: (_COPY, [target]) for name, target in heads.items()}
        self._actual = self._resolve(table)
        super().__init__(self._rows)

    def _resolve(self, table: Table) -> dict[str, str]:
        """Map expected names to names in the state dict, where ``model.`` may be missing."""
        actual: dict[str, str] = {}
        for name in itertools.chain.from_iterable(names for _, names in self._rows.values()):
            shorter = name.partition(".")[2]
            actual[name] = name if name in self._state or shorter not in self._state else shorter
        # Every tensor must be used. Buffers and a copy of the tied output layer are exceptions.
        surplus = set(self._state) - set(actual.values())
        _, tied_copy = _row(canonical.OUTPUT_LAYER, table)
        surplus = {n for n in surplus if not _BUFFERS.search(n) and n not in tied_copy}
        # Additional layers that predict further tokens have such a projection. No model uses them.
        predictors = {n.removesuffix("eh_proj.weight") for n in surplus if "eh_proj.weight" in n}
        surplus = {n for n in surplus if not n.startswith(tuple(predictors))}
        missing = [name for name in actual if actual[name] not in self._state]
        if missing or surplus:
            raise CheckpointError(
                f"the tensors do not fit config.json: missing {missing[:4] or 'none'}, unexpected "
                f"{sorted(surplus)[:4] or 'none'}. Give the config.json of this model"
            )
        # A stored copy of a tied output layer must equal the embedding.
        is_tied = not any(
            name in self._rows for name in (canonical.OUTPUT_LAYER, *canonical.REWARD_HEAD)
        )
        (embedding,), (copy,) = self._rows[canonical.EMBEDDING][1], tied_copy
        if is_tied and copy in self._state:
            if torch.equal(self._state[copy], self._state[actual[embedding]]):
                return actual
            raise CheckpointError(
                f"config.json ties the output layer to the embedding, but {copy} differs from "
                f"{embedding}. Set tie_word_embeddings=false in config.json to use {copy}"
            )
        return actual

    def __getitem__(self, name: str) -> Tensor:
        layout, sources = self._rows[name]
        parts = [self._state[self._actual[source]] for source in sources]
        for source, part in zip(sources, parts, strict=True):
            if not part.is_floating_point():
                raise CheckpointError(
                    f"{source} of a quantised model has dtype {part.dtype}. Give the model in bf16"
                )
        shapes = {s: list(p.shape) for s, p in zip(sources, parts, strict=True)}
        with raised_as(CheckpointError, f"{shapes} do not fit config.json", RuntimeError):
            tensor = layout.join(parts, self._architecture)
        if name not in SCORE:  # the role checks the shape of a head with a clearer error
            canonical.check_shape(name, tensor.shape, self._shapes[name])
        return tensor


class HuggingFaceView(canonical.LazyTensors):
    """Hugging Face name → tensor, converted from canonical ``weights`` when it is indexed."""

    def __init__(
        self, weights: canonical.Weights, table: Table, architecture: GPTArchitecture
    ) -> None:
        self._weights, self._architecture = weights, architecture
        rows = {name: _row(name, table) for name in canonical.expected_shapes(architecture)}
        rows |= {name: (_COPY, [target]) for name, target in SCORE.items()}
        present = set(weights)
        self._rows = {name: row for name, row in rows.items() if name in present}
        self._sources: dict[str, list[tuple[str, int]]] = {}
        for name, (_, targets) in self._rows.items():
            for index, target in enumerate(targets):
                self._sources.setdefault(target, []).append((name, index))
        self._last: tuple[str, list[Tensor]] = "", []
        super().__init__(self._sources)

    def __getitem__(self, target: str) -> Tensor:
        parts = [self._part(*source) for source in self._sources[target]]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    def _part(self, name: str, index: int) -> Tensor:
        if self._last[0] != name:  # parts of one canonical tensor are read consecutively
            layout, _ = self._rows[name]
            self._last = name, layout.part(self._weights[name], self._architecture)
        return self._last[1][index]
