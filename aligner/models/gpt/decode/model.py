"""A megatron-core GPTModel, one token at a time: prefill and decode on a key-value cache.

The model's own weights do the work, by the short cut of `incremental_layers` where it knows all
layers, else by the model's own modules. Inside `IncrementalModel.session` they run without
gradients, in evaluation mode, with a cache in their attention, their weights packed for few-row
products, without sequence parallelism (a pass of one token cannot be cut) and without 8-bit
products (Transformer Engine takes only multiples of 8 rows, and as many as are in flight come).

A pipeline stage runs its own layers on what the stage before it sends. Context-parallel ranks hold
the same weights; sequences are not split, so each of them computes the whole.

Between stages hidden rows go forward and tokens to everyone (`PipelineComm`):

    stage 0: embed, layers ──rows [n, H]──► stage 1: layers ── … ──► last stage: layers, sample
       ▲                                       ▲                             │
       └───────────────────────────────────────┴───────── tokens [n] ────────┘

One pass is under way at a time. Every stage keeps the same books of the rollout, so each knows the
shape of the next message beforehand.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.device import accelerator
from aligner.errors import AlignerError, LayoutError
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

_NOTHING_DRAWN = -1
_KEPT_SHARE = 1 / 32  # of the device: larger caches are given back before training


class PipelineComm:
    """This process's place in the pipeline; with one stage nothing is sent."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """``group``: the stages in order. ``device``: of the rows and the tokens."""
        self._group = group
        self._device = device
        self._rank, self._last = dist.get_rank(group), dist.get_world_size(group) - 1

    @property
    def is_first(self) -> bool:
        """True if the rows begin here, as embeddings."""
        return self._rank == 0

    @property
    def is_last(self) -> bool:
        """True if tokens are sampled here."""
        return self._rank == self._last

    def receive(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Hidden rows of ``shape`` from the stage before this one."""
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(rows, group=self._group, group_src=self._rank - 1)
        return rows

    def pass_on(self, rows: Tensor) -> None:
        """Send float hidden rows [n, H] to the next stage; the last stage keeps them."""
        if not self.is_last:
            dist.send(rows.contiguous(), group=self._group, group_dst=self._rank + 1)

    def sampled_by_last(
        self, count: int, sample: Callable[[], SampledTokens], record: int = 0
    ) -> SampledTokens:
        """Result of ``sample`` on the last stage for ``count`` rows, on every stage.

        ``record``: columns of its ``kept``.

        Raises:
            AlignerError: what ``sample`` raised there, on every stage.
        """
        if self._last == 0:
            return sample()
        # One message: tokens, the 32 bits of their log-probs, and what else the filter kept.
        message = torch.full(
            (2 + record, count), _NOTHING_DRAWN, dtype=torch.int64, device=self._device
        )
        failure: AlignerError | None = None
        if self.is_last:
            try:
                sampled = sample()
                message[0], message[1] = sampled.tokens, sampled.logprobs.view(torch.int32)
                if sampled.kept is not None:
                    message[2:] = sampled.kept.t()
            except AlignerError as error:
                failure = error
        dist.broadcast(message, group=self._group, group_src=self._last)
        tokens, bits = message[:2]
        if bool((tokens == _NOTHING_DRAWN).any()):
            raise self._failure_of_last(failure)
        kept = message[2:].t().int() if record else None
        return SampledTokens(tokens, bits.to(torch.int32).view(torch.float32), kept=kept)

    def _failure_of_last(self, failure: AlignerError | None) -> AlignerError:
        box = [failure]
        dist.broadcast_object_list(
            box, group=self._group, group_src=self._last, device=accelerator.device()
        )
        assert box[0] is not None
        return box[0]


_CUT_BY_ROWS = ("sequence_parallel", "reduce_scatter_embeddings")
_EIGHT_BIT = {"fp8": None, "moe_router_padding_for_quantization": False}


class IncrementalModel:
    """Next-token logits of sequences that are in flight together, one slot each."""

    def __init__(
        self,
        gpt: GPTModel,
        architecture: GPTArchitecture,
        *,
        num_slots: int,
        capacity: int,
        tp_group: dist.ProcessGroup,
    ) -> None:
        """Prepare for at most ``num_slots`` sequences of at most ``capacity`` tokens.

        Raises:
            LayoutError: the model's attention is not ours.
        """
        self._attention = [module for module in gpt.modules() if isinstance(module, CoreAttention)]
        if not self._attention:
            raise LayoutError(
                "generation keeps its cache in aligner's own core attention and this model was "
                "built with another one; build it with the local layer spec"
            )
        self._gpt = gpt
        self._vocab_size = architecture.vocab_size
        parameter = next(gpt.parameters())
        self._device = parameter.device
        self.stages = PipelineComm(gpt.pg_collection.pp, self._device)
        self._embedded: VocabShard | None = None  # the first stage's
        if self.stages.is_first:
            table = gpt.embedding.word_embeddings.weight
            self._embedded = VocabShard.of(table, architecture.vocab_size, tp_group)
        self._shard: VocabShard | None = None  # the last stage's
        if self.stages.is_last:
            self._shard = VocabShard.of(output_weight(gpt), architecture.vocab_size, tp_group)
        ranks = dist.get_world_size(tp_group)
        groups = max(1, architecture.num_query_groups // ranks)
        queries = architecture.num_attention_heads // ranks // groups
        self.cache = KVCache(
            [module.layer_number for module in self._attention],
            num_slots,
            capacity,
            groups=groups,
            queries=queries,
            head_dim=architecture.kv_channels,
            dtype=parameter.dtype,
            device=parameter.device,
            window=architecture.window_size,
        )
        self._rope: Tensor | None = None
        self._rotation: Rotation | None = None
        if architecture.position_embedding == "rope":
            # Not through the module's own cache: that would keep this table for training passes.
            self._rope = gpt.rotary_pos_emb.get_emb(aligned(capacity)).to(parameter.device)
            shape = queries, architecture.kv_channels
            self._rotation = Rotation.table(self._rope, *shape, parameter.dtype)
        self._project: Product | None = None
        self._layers: list[IncrementalLayer] | None = None
        self._final_norm: Callable[[Tensor], Tensor] | None = None  # the last stage's

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The block in which `prefill`, `decode` and `logits` may be called.

        Weights are packed on entry; they must not change inside.
        """
        was_training = self._gpt.training
        self._gpt.eval()
        try:
            with (
                _settings_of_decoding(self._gpt),
                packed_linears(self._gpt) as products,
                self._attached_cache(),
                without_gradients(self._gpt),
            ):
                if self._shard is not None:
                    self._project = Product(output_weight(self._gpt)[: self._shard.columns or 1])
                self._layers = incremental_layers(self._gpt, products)
                if self.stages.is_last:
                    self._final_norm = fast_norm(self._gpt.decoder.final_layernorm)
                yield
        finally:
            self._project = self._layers = self._final_norm = None
            self._gpt.train(was_training)

    @property
    def can_be_captured(self) -> bool:
        """True if `decode` and `logits` only launch kernels of this process; inside a session."""
        whole = self._shard is not None and self._shard.group is None
        return self._layers is not None and self.stages.is_first and whole

    @property
    def can_be_kept(self) -> bool:
        """True if graphs are worth their memory until the next session; inside a session.

        They are not where they read copies of weights, such as those with adapters merged in.
        """
        parts = [part for layer in self._layers or () for part in vars(layer).values()]
        options = [getattr(part, "keywords", getattr(part, "__dict__", {})) for part in parts]
        read = {each["weight"].data_ptr() for each in options if "weight" in each}
        small = self.cache.nbytes <= accelerator.total_memory_bytes() * _KEPT_SHARE
        weights = {each.data_ptr() for each in self._gpt.parameters()}
        return self.can_be_captured and small and read <= weights

    def prefill(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        sources: Sequence[int],
    ) -> Tensor:
        """Run prompts and put their keys and values into slots.

        Args:
            tokens: int64 [n, P] on the host, right-padded; P a multiple of `kv_cache.ALIGNMENT`.
            lengths: [n].
            slots: [m], the slots to fill.
            sources: [m], which of the n prompts goes there.

        Returns:
            Final hidden state of each prompt's last token, [n, H]; before the last pipeline stage
            this stage's.
        """
        self.cache.begin_prefill(lengths, slots, sources)
        ends, positions = torch.tensor(lengths), torch.arange(tokens.shape[1])
        here = partial(accelerator.to_device, where=self._device)
        if self._layers is None:
            rope = None if self._rope is None else self._rope[: tokens.shape[1]]
            hidden = self._forward(here(tokens), here(positions).expand_as(tokens), rope)
            return hidden[here(ends - 1), torch.arange(len(lengths), device=self._device)]
        positions = positions.expand_as(tokens)
        inside = positions < ends[:, None]
        return self._through_layers(
            here(tokens[inside]), here(positions[inside]), here(ends.cumsum(0) - 1)
        )

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Add one token to each of the first n slots.

        Args:
            tokens: int64 [n].
            positions: int64 [n], where the tokens stand in their sequences.
            longest: ``positions.max() + 1``.

        Returns:
            Final hidden states [n, H]; before the last pipeline stage this stage's.
        """
        self.cache.begin_decode(positions, longest)
        if self._layers is None:
            rope = None if self._rope is None else self._rope[positions].transpose(0, 1)
            return self._forward(tokens[:, None], positions[:, None], rope)[0]
        return self._through_layers(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] of final hidden states [n, H]; padding columns cut off.

        Of bfloat16 states float32 on a GPU, bfloat16 on a CPU. For the last pipeline stage.
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

    def _through_layers(
        self, tokens: Tensor, positions: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """Rows, int64 [n] each, to final hidden states [n, H], or of the rows ``kept`` [m, H]."""
        assert self._layers is not None
        hidden = self._enter_rows(tokens, positions)
        rotation = None if self._rotation is None else self._rotation.at(positions)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, rotation, self.cache)
        if self._final_norm is not None:
            hidden = self._layers[-1](hidden, rotation, self.cache, kept)
            return self._final_norm(hidden)
        hidden = self._layers[-1](hidden, rotation, self.cache)
        self.stages.pass_on(hidden)
        return hidden if kept is None else hidden[kept]

    def _forward(self, tokens: Tensor, positions: Tensor, rope: Tensor | None) -> Tensor:
        """int64 [n, s] to final hidden states [s, n, H]."""
        decoder = self._gpt.decoder
        entering = self._enter(tokens, positions)
        decoder.set_input_tensor(entering)  # where stages after the first look for it
        try:
            hidden = decoder(hidden_states=entering, attention_mask=None, rotary_pos_emb=rope)
        finally:
            decoder.set_input_tensor(None)
        self.stages.pass_on(hidden)
        return hidden

    def _enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [n, s] to what this stage's first layer reads, [s, n, H]."""
        if self.stages.is_first:
            return self._gpt.embedding(input_ids=tokens, position_ids=positions)
        rows, length = tokens.shape
        config = self._gpt.config
        return self.stages.receive(length, rows, config.hidden_size, dtype=config.params_dtype)

    def _enter_rows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [n] to what this stage's first layer reads, [n, H]."""
        if self._embedded is None:
            return self._enter(tokens[:, None], positions[:, None])[0]
        embedding = self._gpt.embedding
        table = embedding.word_embeddings.weight
        if self._embedded.group is None:
            hidden = F.embedding(tokens, table)
        else:
            local, owned = self._embedded.localize(tokens)
            hidden = self._embedded.sum(F.embedding(local, table) * owned[:, None])
        if embedding.add_position_embedding:
            hidden += embedding.position_embeddings(positions)
        return hidden

    @contextlib.contextmanager
    def _attached_cache(self) -> Iterator[None]:
        for module in self._attention:
            module.cache = self.cache
        try:
            yield
        finally:
            for module in self._attention:
                module.cache = None


def without_gradients(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """`torch.inference_mode`, or `torch.no_grad` for modules of Transformer Engine.

    Those keep tensors between passes and are not known to take them up in training again where
    they were made in inference mode.
    """
    if any(is_transformer_engine(module) for module in model.modules()):
        return torch.no_grad()
    return torch.inference_mode()


@contextlib.contextmanager
def _settings_of_decoding(model: nn.Module) -> Iterator[None]:
    """Switch off what passes of few rows cannot have, in the modules and their configs."""
    modules: list[Any] = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}.values()
    off: list[tuple[Any, str, bool | None]]
    off = [(owner, name, False) for owner in (*modules, *configs) for name in _CUT_BY_ROWS]
    off += [(config, name, value) for config in configs for name, value in _EIGHT_BIT.items()]
    switched = [
        (owner, name, value, before)
        for owner, name, value in off
        if (before := getattr(owner, name, value)) not in (False, None)
    ]
    try:
        for owner, name, value, _ in switched:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, _, before in switched:
            setattr(owner, name, before)
