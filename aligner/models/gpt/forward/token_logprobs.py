"""Log-probs from hidden states, in the one frame of `aligner.types`.

Only selected positions reach the vocabulary. Where a batch asks for one token at each, logits are
never in memory (`token_logprobs`). Where K candidates for each token are asked for, or the best K,
logits exist for some rows at a time.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.config import SamplingParams
from aligner.distributed.model_utils.distillation import logprobs_of, mean_logprob
from aligner.distributed.model_utils.vocab_topk import distributed_vocab_topk
from aligner.kernels.linear_product import wide_linear
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.models.gpt.forward.token_layout import BoolArray, TokenLayout
from aligner.types import TokenOutputs


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    sampling: SamplingParams,
    with_entropy: bool = False,
    kept_ids: Tensor | None = None,
) -> TokenOutputs:
    """Log-prob (and entropy) of the tokens where ``selected``; 0 elsewhere.

    Token t is predicted from the hidden state at t - 1, so positions that are not selected (the
    prompt, padding) are dropped before the output layer and never cost a vocabulary.

    Args:
        hidden: ``[n * L, H]``, rows of the layout, with gradients when they are wanted; under
            tensor parallelism its gradient is this rank's part.
        weight: ``[V / tp, H]`` of the output layer; every rank has as many rows.
        input_ids: int64 ``[B, S]``.
        selected: ``[B, S]`` on the host, true where the log-prob of token t is wanted. Position 0
            has no predecessor and is never computed.
        layout: which row holds which token.
        vocab_size: unpadded vocabulary.
        tp_group: spreads the vocabulary; None: it is whole.
        sampling: temperature, top-k and top-p of the distribution the tokens were drawn from.
        with_entropy: also return the entropy of that distribution.
        kept_ids: int ``[B, S, K]``, what top-k and top-p kept when a token was sampled, see
            `hidden_states_to_logprobs`; None: not recorded.

    Returns:
        float32 ``[B, S]`` each.
    """
    rows, tokens = layout.predicted_tokens(selected)
    logprobs, entropy = hidden_states_to_logprobs(
        layout.take(hidden, rows),
        weight,
        input_ids.flatten()[tokens],
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        with_entropy=with_entropy,
        kept_ids=None if kept_ids is None else kept_ids.flatten(0, 1)[tokens],
    )
    return TokenOutputs(
        layout.to_frame(logprobs, tokens),
        None if entropy is None else layout.to_frame(entropy, tokens),
    )


def token_logits(
    hidden: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
) -> Tensor:
    """Logits of the token after each one, over ``temperature``: float32 ``[B, S, V]``.

    0 beyond a sequence's length. All of them are in memory at once, on every tensor-parallel rank;
    `token_logprobs` is for those who do not need that. Arguments as there.
    """
    rows, tokens = layout.held_tokens()
    logits = wide_linear(layout.take(hidden, rows), weight) / temperature
    if tp_group is not None:
        logits = gather_from_tensor_model_parallel_region(logits, group=tp_group)
    return layout.to_frame(logits[:, :vocab_size], tokens)


_LOGIT_BYTES = 256 * 2**20  # of the logits that exist at a time


def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    with_entropy: bool,
) -> TokenOutputs:
    """Log-probs of the tokens that might stand at each selected position; 0 elsewhere.

    Args:
        hidden: ``[n * L, H]``, rows of the layout; under tensor parallelism its gradient is this
            rank's part.
        weight: ``[V / tp, H]`` of the output layer; every rank has as many rows.
        candidates: int64 ``[B, S, K]``, token ids; position t speaks of token t.
        selected: ``[B, S]`` on the host, true where log-probs are wanted; never position 0.
        layout: which row holds which token.
        vocab_size: unpadded vocabulary, over which the log-probs are normalised.
        tp_group: spreads the vocabulary; None: it is whole.
        temperature: logits are divided by it.
        with_entropy: also return the entropy of the whole distribution.

    Returns:
        float32 ``[B, S, K]``, and the entropy ``[B, S]``.
    """
    shard = VocabShard.of(weight, vocab_size, tp_group)
    rows, tokens = layout.predicted_tokens(selected)
    ids = candidates.flatten(0, 1)[tokens]

    def outputs(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        logits = _logits(hidden, weight, temperature)
        logprobs = logprobs_of(logits, ids[None], shard)[0]
        return (logprobs, -mean_logprob(logits, shard)[0]) if with_entropy else (logprobs,)

    chosen = layout.take(hidden, rows)
    parts = list(_slices(len(rows), weight))
    computed: Callable[..., tuple[Tensor, ...]] = outputs
    if len(parts) > 1 and torch.is_grad_enabled():
        # Again in the backward pass, so that one part's logits are kept at most.
        computed = partial(checkpoint, outputs, use_reentrant=False, preserve_rng_state=False)
    found = [computed(chosen[part], weight, ids[part]) for part in parts]
    logprobs, *entropy = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return TokenOutputs(
        layout.to_frame(logprobs, tokens),
        layout.to_frame(entropy[0], tokens) if with_entropy else None,
    )


@torch.no_grad()
def best_candidates(
    hidden: Tensor,
    weight: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    count: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest tokens at each selected position, among the first ``vocab_size``.

    Other arguments as in `candidate_logprobs`. Returns their logits over ``temperature``, float32
    ``[B, S, count]`` in descending order, and their ids, int64 ``[B, S, count]``; 0 elsewhere.
    """
    shard = VocabShard.of(weight, vocab_size, tp_group)
    rows, tokens = layout.predicted_tokens(selected)
    chosen = layout.take(hidden, rows)
    found = [
        distributed_vocab_topk(
            _logits(chosen[part], weight, temperature),
            count,
            shard.group,
            vocab_start_index=shard.start,
            vocab_end_index=shard.start + shard.columns,
        )
        for part in _slices(len(rows), weight)
    ]
    logits, ids = (torch.cat([piece[0] for piece in pieces]) for pieces in zip(*found, strict=True))
    return layout.to_frame(logits, tokens), layout.to_frame(ids, tokens)


def _slices(rows: int, weight: Tensor) -> Iterator[slice]:
    """Slices of rows whose logits fit; at least one, for the collectives of all ranks."""
    size = max(1, _LOGIT_BYTES // (weight.shape[0] * torch.float32.itemsize))
    for start in range(0, max(1, rows), size):
        yield slice(start, min(start + size, rows))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """``[N, H]`` to ``[1, N, V_local]``, in float32 at least."""
    return (wide_linear(hidden, weight) / temperature)[None]
