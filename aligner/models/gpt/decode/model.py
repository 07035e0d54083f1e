"""Token-by-token decoding with a megatron-core GPTModel and a key-value cache.

`incremental_layers` compute the layers if possible, otherwise the model's modules do. Sequence
parallelism is off, because one token cannot be split. 8-bit products are off, because Transformer
Engine requires multiples of 8 rows. Each context-parallel rank computes full sequences.

A pipeline stage sends hidden rows to the next stage. The last stage sends tokens to all stages:

    stage 0: embed, layers ──rows [n, H]──► stage 1: layers ── … ──► last stage: layers, sample
       ▲                                       ▲                             │
       └───────────────────────────────────────┴───────── tokens [n] ────────┘
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.device import accelerator
from aligner.errors import AlignerError
from aligner.kernels.linear_product import Product, has_wide_products, packed_linears, wide_mm
from aligner.logprobs.output_layer import VocabShard, output_weight
from aligner.models.gpt.decode.kv_cache import KVCache, aligned
from aligner.models.gpt.decode.layers import (
    IncrementalLayer,
    Rotation,
    fast_norm,
    incremental_layers,
    is_transformer_engine,
)
from aligner.models.gpt.decode.sampling import SampledTokens
from aligner.models.gpt.layers.attention import CoreAttention

_NO_TOKEN = -1
_MAX_KEPT_SHARE = 1 / 32  # caches above this share of device memory are freed before training


class PipelineComm:
    """Communication between the pipeline stages in ``group``. A single stage sends nothing."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank, self._last = dist.get_rank(group), dist.get_world_size(group) - 1
        self.is_first = self._rank == 0  # this stage computes the embeddings
        self.is_last = self._rank == self._last  # this stage samples the tokens

    def receive(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Receive hidden states of ``shape`` from the previous stage."""
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(rows, group=self._group, group_src=self._rank - 1)
        return rows

    def send_to_next(self, rows: Tensor) -> None:
        """Send hidden states, float [n, H], to the next stage, if any."""
        if not self.is_last:
            dist.send(rows.contiguous(), group=self._group, group_dst=self._rank + 1)

    def sampled_by_last(
        self, count: int, sample: Callable[[], SampledTokens], record: int = 0
    ) -> SampledTokens:
        """Call ``sample`` on the last stage. Return its result for ``count`` rows on all stages.

        ``record``: number of columns of ``kept_ids``. If ``sample`` raises an `AlignerError`, all
        stages raise it.
        """
        if self._last == 0:
            return sample()
        # One message: tokens, the 32 bits of their log-probs, and the ids that a filter kept.
        message = torch.full((2 + record, count), _NO_TOKEN, dtype=torch.int64, device=self._device)
        failure: AlignerError | None = None
        if self.is_last:
            try:
                sampled = sample()
                message[0], message[1] = sampled.tokens, sampled.logprobs.view(torch.int32)
                if sampled.kept_ids is not None:
                    message[2:] = sampled.kept_ids.t()
            except AlignerError as error:
                failure = error
        dist.broadcast(message, group=self._group, group_src=self._last)
        tokens, bits = message[:2]
        if bool((tokens == _NO_TOKEN).any()):
            failures = [failure]
            dist.broadcast_object_list(
                failures, group=self._group, group_src=self._last, device=accelerator.device()
            )
            assert failures[0] is not None
            raise failures[0]
        kept_ids = message[2:].t().int() if record else None
        return SampledTokens(tokens, bits.to(torch.int32).view(torch.float32), kept_ids=kept_ids)


_SEQUENCE_PARALLEL = ("sequence_parallel", "reduce_scatter_embeddings")
_EIGHT_BIT = {"fp8": None, "moe_router_padding_for_quantization": False}


class IncrementalModel:
    """Computes next-token logits of sequences, each in a slot of a key-value cache."""

    cache_type: ClassVar[type[KVCache]] = KVCache

    def __init__(
        self, gpt: GPTModel, architecture: GPTArchitecture, num_slots: int, capacity: int
    ) -> None:
        """Allocate a cache for ``num_slots`` sequences of at most ``capacity`` tokens."""
        self._attention = [module for module in gpt.modules() if isinstance(module, CoreAttention)]
        assert self._attention, "generation needs aligner's core attention"
        self._gpt = gpt
        self._vocab_size = architecture.vocab_size
        parameter = next(gpt.parameters())
        self._device = parameter.device
        self.stages = PipelineComm(gpt.pg_collection.pp, self._device)
        tp_group = gpt.pg_collection.tp
        # The vocabulary shards: of the embedding (first stage) and the output layer (last stage).
        self._embedded: VocabShard | None = None
        if self.stages.is_first:
            table = gpt.embedding.word_embeddings.weight
            self._embedded = VocabShard.of(table, architecture.vocab_size, tp_group)
        self._shard: VocabShard | None = None
        if self.stages.is_last:
            self._shard = VocabShard.of(output_weight(gpt), architecture.vocab_size, tp_group)
        # The cache and the rotary table of this rank's heads.
        ranks = dist.get_world_size(tp_group)
        groups = max(1, architecture.num_query_groups // ranks)
        queries = architecture.num_attention_heads // ranks // groups
        self.cache = self.cache_type(
            [module.layer_number for module in self._attention],
            num_slots,
            capacity,
            groups=groups,
            queries=queries,
            head_dim=architecture.kv_channels,
            dtype=parameter.dtype,
            device=parameter.device,
            scale=self._attention[0].scale,
            windows=[module.window for module in self._attention],
        )
        self._rope: Tensor | None = None
        self._rotation: Rotation | None = None
        if architecture.position_embedding == "rope":
            # The module's own cache would keep this table for training passes.
            self._rope = gpt.rotary_pos_emb.get_emb(aligned(capacity)).to(parameter.device)
            shape = queries, architecture.kv_channels
            factor = architecture.rope_concentration
            self._rotation = Rotation.table(self._rope, *shape, parameter.dtype, factor)
        # Set inside of `session`. Output layer and final norm are on the last stage.
        self._project: Product | None = None
        self._layers: list[IncrementalLayer] | None = None
        self._final_norm: Callable[[Tensor], Tensor] | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Enable `prefill`, `decode` and `logits`. Weights must not change inside the block."""
        was_training = self._gpt.training
        self._gpt.eval()
        for module in self._attention:
            module.cached = self.cache.attend
        try:
            with (
                _decoding_settings(self._gpt),
                packed_linears(self._gpt) as products,
                without_gradients(self._gpt),
            ):
                # The packed weights, for the layers and for the output layer.
                if self._shard is not None:
                    self._project = Product(output_weight(self._gpt)[: self._shard.columns or 1])
                self._layers = incremental_layers(self._gpt, products)
                if self.stages.is_last:
                    self._final_norm = fast_norm(self._gpt.decoder.final_layernorm)
                yield
        finally:
            self._project = self._layers = self._final_norm = None
            for module in self._attention:
                module.cached = None
            self._gpt.train(was_training)

    @property
    def can_be_captured(self) -> bool:
        """True, in a session, if a CUDA graph can contain `decode` and `logits`."""
        # They must not communicate.
        is_unsplit = self._shard is not None and self._shard.group is None
        return self._layers is not None and self.stages.is_first and is_unsplit

    @property
    def can_be_kept(self) -> bool:
        """True, in a session, if CUDA graphs and their cache may be kept between rollouts."""
        # The cache must be small, and graphs must not read temporary copies of weights.
        parts = [part for layer in self._layers or () for part in vars(layer).values()]
        options = [getattr(part, "keywords", getattr(part, "__dict__", {})) for part in parts]
        read = {option["weight"].data_ptr() for option in options if "weight" in option}
        small = self.cache.nbytes <= accelerator.total_memory_bytes() * _MAX_KEPT_SHARE
        weights = {parameter.data_ptr() for parameter in self._gpt.parameters()}
        return self.can_be_captured and small and read <= weights

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """Run prompts, store keys and values, and return hidden states of the last tokens, [n, H].

        ``tokens``: int64 [n, P] on the host, right-padded, P a multiple of `kv_cache.ALIGNMENT`.
        ``lengths``: [n], length of each prompt. ``slots``: [m], slots to fill. ``sources``: [m],
        index of each slot's prompt. Each pipeline stage returns its own hidden states.
        """
        self.cache.begin_prefill(lengths, slots, sources)
        ends, positions = torch.tensor(lengths), torch.arange(tokens.shape[1])
        to_device = partial(accelerator.to_device, where=self._device)
        # The model's modules need padded sequences, the fast layers only rows of tokens.
        if self._layers is None:
            rope = None if self._rope is None else self._rope[: tokens.shape[1]]
            hidden = self._forward(to_device(tokens), to_device(positions).expand_as(tokens), rope)
            return hidden[to_device(ends - 1), torch.arange(len(lengths), device=self._device)]
        positions = positions.expand_as(tokens)
        inside = positions < ends[:, None]
        last = to_device(ends.cumsum(0) - 1)
        return self._run_layers(to_device(tokens[inside]), to_device(positions[inside]), last)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Append ``tokens[i]`` at position ``positions[i]``, int64 [n] each, to slot i.

        ``longest``: ``positions.max() + 1``. Returns this stage's hidden states, [n, H].
        """
        self.cache.begin_decode(positions, longest)
        if self._layers is None:
            rope = None if self._rope is None else self._rope[positions].transpose(0, 1)
            return self._forward(tokens[:, None], positions[:, None], rope)[0]
        return self._run_layers(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute next-token logits [n, V] from final hidden states [n, H], on the last stage.

        Logits of bfloat16 states are float32 on a GPU and bfloat16 on a CPU.
        """
        assert self._project is not None
        assert self._shard is not None
        if has_wide_products(hidden, self._project.weight):
            local = wide_mm(hidden, self._project.weight.t())
        else:
            local = self._project(hidden, None)
        if self._shard.group is None:
            return local
        width = output_weight(self._gpt).shape[0]
        padded = F.pad(local, (0, width - local.shape[1]))
        by_rank = self._shard.stack_ranks(padded)  # [ranks, n, columns]
        return by_rank.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def _run_layers(
        self, tokens: Tensor, positions: Tensor, selected: Tensor | None = None
    ) -> Tensor:
        """Compute hidden states of ``tokens`` [n]: [n, H], or [m, H] of ``selected`` rows [m]."""
        assert self._layers is not None
        hidden = self._input_rows(tokens, positions)
        rotation = None if self._rotation is None else self._rotation.at(positions)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, rotation, self.cache)
        if self._final_norm is not None:
            hidden = self._layers[-1](hidden, rotation, self.cache, selected)
            return self._final_norm(hidden)
        hidden = self._layers[-1](hidden, rotation, self.cache)
        self.stages.send_to_next(hidden)
        return hidden if selected is None else hidden[selected]

    def _forward(self, tokens: Tensor, positions: Tensor, rope: Tensor | None) -> Tensor:
        """Compute hidden states [s, n, H] of ``tokens``, int64 [n, s], with training modules."""
        decoder = self._gpt.decoder
        stage_input = self._stage_input(tokens, positions)
        decoder.set_input_tensor(stage_input)  # read by stages after the first
        try:
            hidden = decoder(hidden_states=stage_input, attention_mask=None, rotary_pos_emb=rope)
        finally:
            decoder.set_input_tensor(None)
        self.stages.send_to_next(hidden)
        return hidden

    def _stage_input(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed ``tokens``, int64 [n, s], or receive the previous stage's output, [s, n, H]."""
        if self.stages.is_first:
            return self._gpt.embedding(input_ids=tokens, position_ids=positions)
        rows, length = tokens.shape
        config = self._gpt.config
        return self.stages.receive(length, rows, config.hidden_size, dtype=config.params_dtype)

    def _input_rows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed ``tokens``, int64 [n], or receive the previous stage's output, [n, H]."""
        if self._embedded is None:
            return self._stage_input(tokens[:, None], positions[:, None])[0]
        embedding = self._gpt.embedding
        table = embedding.word_embeddings.weight
        if self._embedded.group is None:
            hidden = F.embedding(tokens, table)
        else:
            local, owned = self._embedded.localize(tokens)
            hidden = self._embedded.sum(F.embedding(local, table) * owned[:, None])
        if self._gpt.config.embedding_multiplier != 1.0:
            hidden = hidden * self._gpt.config.embedding_factor
        if embedding.add_position_embedding:
            hidden += embedding.position_embeddings(positions)
        return hidden


def without_gradients(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return `torch.inference_mode`, or `torch.no_grad` if modules reuse tensors in training."""
    # Transformer Engine may be unable to train with inference tensors of earlier passes.
    if any(is_transformer_engine(module) for module in model.modules()):
        return torch.no_grad()
    return torch.inference_mode()


@contextlib.contextmanager
def _decoding_settings(model: nn.Module) -> Iterator[None]:
    """Run ``model`` without sequence parallelism and FP8 matrix products inside the block."""
    modules: list[Any] = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}.values()
    # Modules copy some settings of their config. Only enabled settings are changed.
    off: list[tuple[Any, str, bool | None]]
    off = [(owner, name, False) for owner in (*modules, *configs) for name in _SEQUENCE_PARALLEL]
    off += [(config, name, value) for config in configs for name, value in _EIGHT_BIT.items()]
    changes = [
        (owner, name, value, original)
        for owner, name, value in off
        if (original := getattr(owner, name, value)) not in (False, None)
    ]
    try:
        for owner, name, value, _ in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, _, original in changes:
            setattr(owner, name, original)


class DecodingModel(Protocol):
    """Model that a `Rollout` samples from. `IncrementalModel` documents the methods."""

    @property
    def cache(self) -> Any:
        """Object with the attribute ``capacity`` and the methods ``fits`` and ``copy``."""

    @property
    def stages(self) -> Any:
        """Object with the method ``sampled_by_last`` of `PipelineComm`."""

    @property
    def can_be_captured(self) -> bool:
        """See `IncrementalModel.can_be_captured`."""

    @property
    def can_be_kept(self) -> bool:
        """See `IncrementalModel.can_be_kept`."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """See `IncrementalModel.session`."""

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `IncrementalModel.prefill`."""

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `IncrementalModel.decode`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `IncrementalModel.logits`."""


@dataclass
class SampledModel:
    """A model to sample from, and the function that prepares it for decoding."""

    model: nn.Module  # all of its parameters are on the device of the rollout
    decoder: Callable[[int, int], DecodingModel]  # of the number of slots and their capacity
    # Ranks that sample the same sequences. All of them get the first rank's results.
    copies: dist.ProcessGroup | None = None
    is_pipelined: bool = False

    @classmethod
    def of_gpt(
        cls, gpt: GPTModel, architecture: GPTArchitecture, decoder: type[IncrementalModel]
    ) -> "SampledModel":
        """Prepare sampling from this process's shard of a megatron-core model."""
        groups = gpt.pg_collection
        return cls(
            gpt, partial(decoder, gpt, architecture), groups.cp, dist.get_world_size(groups.pp) > 1
        )


@contextlib.contextmanager
def synchronized_experts(model: nn.Module) -> Iterator[None]:
    """Allow ranks to run different numbers of forward passes inside the block.

    Expert layers of megatron-core need all ranks of the expert-parallel group, but the ranks finish
    generation at different times. Every forward pass is therefore announced to the group. At the
    end of the block, a rank runs only the expert layers, on one token of zeros, in each pass that
    other ranks announce, until all have finished. All ranks of the group must enter the block. An
    error inside the block does not wait for the other ranks.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers or layers[0].ep_group.size() == 1:
        yield
        return
    group = layers[0].ep_group

    # Announce every pass of this rank to the finished ranks.
    def announce(*_: Any) -> None:
        _any_rank_works(True, group)

    hook = model.decoder.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    # This rank has finished: join the passes of the others with one token of zeros.
    parameter = next(model.decoder.parameters())
    idle = parameter.new_zeros(1, 1, model.config.hidden_size)
    with torch.no_grad():
        while _any_rank_works(False, group):
            for experts in layers:
                experts(idle)


def _any_rank_works(this_rank: bool, group: dist.ProcessGroup) -> bool:
    working = torch.tensor([int(this_rank)], device=accelerator.device())
    dist.all_reduce(working, dist.ReduceOp.MAX, group=group)
    return bool(working.item())
