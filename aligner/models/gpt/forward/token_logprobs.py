"""Log-probs of tokens, computed from hidden states, in the padded shape of the batch.

Only selected positions are projected to the vocabulary. For one token per position, logits are
never materialised. For K candidates, the logits of a part of the rows are in memory at a time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.distributed.model_utils.distillation import logprobs_of, mean_logprob
from aligner.distributed.model_utils.vocab_topk import distributed_vocab_topk
from aligner.kernels.linear_product import wide_linear
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from aligner.models.gpt.forward.token_layout import BoolArray, TokenLayout
from aligner.types import TokenOutputs


class LogitsForm(NamedTuple):
    """Form of a model's logits: ``cap * tanh(scale * hidden @ weight.T / cap)``, if capped."""

    scale: float = 1.0
    cap: float | None = None


class Projection(NamedTuple):
    """Hidden states and the output layer that computes logits.

    ``rows``: hidden states, float ``[n * L, H]``. Under tensor parallelism, each rank computes a
    summand of their gradient. ``weight``: output layer, ``[V / tp, H]``. ``vocab_size``: size of
    the vocabulary without padding. ``temperature``: divisor of the logits. ``cap``: soft cap of the
    divided logits.
    """

    rows: Tensor
    weight: Tensor
    vocab_size: int
    tp_group: dist.ProcessGroup | None
    temperature: float = 1.0
    cap: float | None = None

    @property
    def shard(self) -> VocabShard:
        """Part of the vocabulary in ``weight``."""
        return VocabShard.of(self.weight, self.vocab_size, self.tp_group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits ``[N, V / tp]``, float32 or wider, from hidden states ``[N, H]``."""
        return _logits(hidden, self.weight, self.temperature, self.cap)


def _logits(hidden: Tensor, weight: Tensor, temperature: float, cap: float | None) -> Tensor:
    logits = wide_linear(hidden, weight) / temperature
    return logits if cap is None else cap * torch.tanh(logits / cap)


def token_logprobs(
    projection: Projection,
    input_ids: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    sampling: TrainingSamplingParams,
    with_entropy: bool = False,
    kept_ids: Tensor | None = None,
) -> TokenOutputs:
    """Compute log-probs (and entropies) of the selected tokens, float32 ``[B, S]``, 0 elsewhere.

    ``input_ids``: int64 ``[B, S]``. ``selected``: bool ``[B, S]`` on the host, true for tokens to
    compute. Position 0 is ignored, because the hidden state at t - 1 predicts token t.
    ``sampling``: temperature, top-k and top-p. ``kept_ids``: int ``[B, S, K]``, see
    `hidden_states_to_logprobs`.
    """
    # Only rows that predict a selected token reach the output layer.
    row_indices, frame_indices = layout.predicted_tokens(selected)
    logprobs, entropy = hidden_states_to_logprobs(
        layout.take(projection.rows, row_indices),
        projection.weight,
        input_ids.flatten()[frame_indices],
        projection.shard,
        sampling,
        cap=projection.cap,
        with_entropy=with_entropy,
        kept_ids=None if kept_ids is None else kept_ids.flatten(0, 1)[frame_indices],
    )
    return TokenOutputs(
        layout.to_frame(logprobs, frame_indices),
        None if entropy is None else layout.to_frame(entropy, frame_indices),
    )


def token_logits(projection: Projection, layout: TokenLayout) -> Tensor:
    """Compute all next-token logits on every rank, float32 ``[B, S, V]``, 0 in padding."""
    row_indices, frame_indices = layout.all_tokens()
    logits = projection.logits(layout.take(projection.rows, row_indices))
    if projection.tp_group is not None:
        logits = gather_from_tensor_model_parallel_region(logits, group=projection.tp_group)
    return layout.to_frame(logits[:, : projection.vocab_size], frame_indices)


_LOGIT_BYTES = 256 * 2**20  # maximum size of the logits that are in memory at a time


def candidate_logprobs(
    projection: Projection,
    candidates: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    with_entropy: bool,
) -> TokenOutputs:
    """Compute log-probs of K candidate tokens at each selected position, 0 elsewhere.

    Log-probs are normalised over the full vocabulary. ``candidates``: int64 ``[B, S, K]``, at
    position t the candidates for token t. Returns log-probs, float32 ``[B, S, K]``, and entropies,
    float32 ``[B, S]``, or None. For the other arguments see `token_logprobs`.
    """
    # The closure must not capture the projection: the backward pass would keep its rows in memory.
    shard, temperature, cap = projection.shard, projection.temperature, projection.cap
    row_indices, frame_indices = layout.predicted_tokens(selected)
    ids = candidates.flatten(0, 1)[frame_indices]

    def outputs(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        logits = _logits(hidden, weight, temperature, cap)[None]
        logprobs = logprobs_of(logits, ids[None], shard)[0]
        return (logprobs, -mean_logprob(logits, shard)[0]) if with_entropy else (logprobs,)

    chosen, weight = layout.take(projection.rows, row_indices), projection.weight
    parts = list(_slices(len(row_indices), weight))
    computed: Callable[..., tuple[Tensor, ...]] = outputs
    if len(parts) > 1 and torch.is_grad_enabled():
        # Recompute logits in the backward pass, so that at most one part's logits exist.
        computed = partial(checkpoint, outputs, use_reentrant=False, preserve_rng_state=False)
    results = [computed(chosen[part], weight, ids[part]) for part in parts]
    logprobs, *entropy = (torch.cat(pieces) for pieces in zip(*results, strict=True))
    return TokenOutputs(
        layout.to_frame(logprobs, frame_indices),
        layout.to_frame(entropy[0], frame_indices) if with_entropy else None,
    )


@torch.no_grad()
def best_candidates(
    projection: Projection, selected: BoolArray, layout: TokenLayout, count: int
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` most likely tokens at each selected position, 0 elsewhere.

    Returns logits, float32 ``[B, S, count]`` in descending order, and ids, int64 ``[B, S, count]``.
    """
    # Part by part, so that the logits of all rows never exist at once.
    shard = projection.shard
    row_indices, frame_indices = layout.predicted_tokens(selected)
    chosen = layout.take(projection.rows, row_indices)
    results = [
        distributed_vocab_topk(
            projection.logits(chosen[part])[None],
            count,
            shard.group,
            vocab_start_index=shard.start,
            vocab_end_index=shard.start + shard.columns,
        )
        for part in _slices(len(row_indices), projection.weight)
    ]
    logits, ids = (
        torch.cat([piece[0] for piece in pieces]) for pieces in zip(*results, strict=True)
    )
    return layout.to_frame(logits, frame_indices), layout.to_frame(ids, frame_indices)


def _slices(rows: int, weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows whose logits fit the memory limit."""
    # At least one slice, because every rank must call the same collectives.
    size = max(1, _LOGIT_BYTES // (weight.shape[0] * torch.float32.itemsize))
    for start in range(0, max(1, rows), size):
        yield slice(start, min(start + size, rows))
