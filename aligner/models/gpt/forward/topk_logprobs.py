"""Log-probs of several candidates for each token, and the best candidates there are.

Where a batch asks for one token at each position, logits are never in memory (`token_logprobs`).
Here K tokens are asked for and logits exist for some rows at a time; the rest is as there: only
selected positions reach the vocabulary, and results stand in the one frame of `aligner.types`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.kernels.wide_product import wide_linear
from aligner.logprobs.published.distillation import logprobs_of, mean_logprob
from aligner.logprobs.published.vocab_topk import distributed_vocab_topk
from aligner.logprobs.vocab_shard import VocabShard
from aligner.models.gpt.forward.token_layout import BoolArray, TokenLayout
from aligner.types import TokenOutputs

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

    chosen = hidden[rows]
    parts = list(_slices(len(rows), weight))
    again = len(parts) > 1 and torch.is_grad_enabled()  # so that one part's logits are kept at most
    found = [
        _recomputed(outputs, chosen[part], weight, ids[part])
        if again
        else outputs(chosen[part], weight, ids[part])
        for part in parts
    ]
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
    chosen = hidden[rows]
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


def _recomputed(
    function: Callable[..., tuple[Tensor, ...]], *arguments: Tensor
) -> tuple[Tensor, ...]:
    """Result of ``function``, which is called again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
