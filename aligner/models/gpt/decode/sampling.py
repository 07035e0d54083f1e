"""Sampling of the next token.

The uniform number of a token is a hash of (seed, sample id, position), independent of batch, slots
and ranks. The token is the inverse CDF at that number over the vocabulary in id order.

The log-prob of a token is under the distribution of its draw: temperature, then top-k, then top-p,
renormalised over the kept tokens, as in training (`aligner.logprobs.top_k_top_p`). The ban of
end-of-sequence tokens before ``min_length`` does not change the log-prob (as in vLLM), unless it
changes the filter. A repetition penalty does, so that recorded and recomputed log-probs differ.

Shape legend: ``b`` rows, ``V`` vocabulary without padding columns.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config import SamplingParams
from aligner.device.counter_hash import UNIFORM_BITS, counter_hash, uniform_bits
from aligner.errors import NonFiniteError
from aligner.kernels.linear_product import running_sum
from aligner.logprobs.top_k_top_p import threshold

_BLOCK = 128  # tokens of a block, in which probabilities are summed
_ONE_LEVEL = 2048  # largest vocabulary that is summed without blocks
_BELOW_ONE = 1.0 - 2.0**-53  # a float64 times this is, rounded, the next smaller float64
_NUCLEUS = 1024  # candidates for a nucleus. If they do not suffice, the full row is sorted.


class SampledTokens(NamedTuple):
    """Sampled tokens of b rows."""

    tokens: Tensor  # int64 [b]
    logprobs: Tensor  # float32 [b], under the distribution of the draw
    wide: Tensor | None = None  # bool [], see `sample_tokens`. None is False
    # int32 [b, k], ids kept by top-k and top-p, padded with -1, all -1 for more than k ids. None if
    # not recorded.
    kept_ids: Tensor | None = None


def counter_uniforms(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [b], the same on all devices.

    ``sample_ids``: int64 [b]. ``positions``: int64 [b], index of each token in its sequence.
    """
    state = counter_hash(seed, sample_ids, positions)
    return uniform_bits(state).double() * 2.0**-UNIFORM_BITS


def penalise_repetition(logits: Tensor, history_mask: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty of CTRL (Keskar et al. 2019) as Hugging Face does.

    Positive raw ``logits``, float [b, V], are divided by ``penalty``, negative logits multiplied,
    where bool ``history_mask`` [b, V] is true: the token occurs in the prompt or the response so
    far.
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(history_mask, penalised, logits)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    sampling: SamplingParams,
    *,
    greedy: bool,
    history_mask: Tensor | None = None,
    banned: Tensor | None = None,
    end_ids: Tensor | None = None,
    may_wait: bool = True,
    record: int = 0,
) -> SampledTokens:
    """Draw one token per row.

    ``logits``: float [b, V], without padding columns. Their memory may be reused. ``uniforms``:
    float64 [b] in [0, 1). ``greedy``: choose the most likely token (the first of equals), with its
    log-prob under ``sampling``. ``history_mask``: bool [b, V], tokens that occurred, required for a
    repetition penalty. ``banned``: bool [b], rows in which the end-of-sequence tokens ``end_ids``,
    int64 [e], cannot be drawn. ``record``: largest number of kept ids to return.

    With ``may_wait`` the host reads the device and checks the result. Otherwise the caller must
    later call `check_finite` and, if ``wide`` is true, draw again with ``may_wait``, because the
    nucleus of some row exceeds the candidates.

    Raises NonFiniteError if the logits of a row are NaN, or infinite without a valid distribution.
    """
    # Scores: penalty, temperature, ban of end tokens, filter.
    scores = logits.float()
    if sampling.repetition_penalty != 1.0:
        assert history_mask is not None
        scores = penalise_repetition(scores, history_mask, sampling.repetition_penalty)
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    allowed = None
    if banned is not None and end_ids is not None and end_ids.numel() > 0:
        allowed = _ban(scores, banned, end_ids)
    wide = kept_ids = None
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        limit, wide = _keep_threshold(scores, sampling.top_k, sampling.top_p, may_wait)
        scores = scores.masked_fill(scores < limit[:, None], -torch.inf)
        kept_ids = _kept_ids(scores, record) if record else None
        allowed = None
    # Draw, and compute the log-probs.
    probabilities = scores.softmax(dim=-1)
    cumulative = _cumulative(probabilities)
    tokens = scores.argmax(dim=-1) if greedy else inverse_cdf(probabilities, uniforms, cumulative)
    chosen = probabilities.gather(1, tokens[:, None]).squeeze(1).double()
    # torch's float32 softmax sums a row one by one: for 49,152 tokens its probabilities are wrong
    # by a common factor of up to 1 ± 1e-4. Dividing by their accurate sum corrects it.
    logprobs = chosen.log() - cumulative[:, -1].log()
    if allowed is not None:
        normalizer = scores.gather(1, tokens[:, None]).squeeze(1).double() - logprobs
        logprobs = logprobs - torch.logaddexp(normalizer, allowed) + normalizer
    if may_wait:
        check_finite(logprobs)
    return SampledTokens(tokens, logprobs.float(), wide, kept_ids)


def _kept_ids(scores: Tensor, limit: int) -> Tensor:
    """Return the ids of tokens above -inf in float [b, V], int32 [b, limit] (`SampledTokens`)."""
    best = scores.topk(min(limit, scores.shape[1]), dim=1)
    too_many = (~scores.isneginf()).sum(1, keepdim=True) > limit
    ids = best.indices.masked_fill(best.values.isneginf() | too_many, -1).int()
    return torch.nn.functional.pad(ids, (0, limit - ids.shape[1]), value=-1)


def check_finite(logprobs: Tensor) -> None:
    """Raise NonFiniteError if log-probs [b] are not finite. Synchronises with the host."""
    if not math.isfinite(logprobs.sum().item()):
        bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
        raise NonFiniteError(
            f"logits of rows {bad} are not finite. The weights are damaged: look for the step at "
            "which the loss or gradient stopped being finite"
        )


def _ban(scores: Tensor, banned: Tensor, end_ids: Tensor) -> Tensor:
    """Set ``end_ids`` to -inf in ``banned`` rows. Return their log-sum-exp [b], or -inf."""
    end_scores = scores[:, end_ids]
    scores[:, end_ids] = end_scores.masked_fill(banned[:, None], -torch.inf)
    mass = end_scores.double()
    mass = mass.logsumexp(dim=1) if len(end_ids) > 1 else mass.squeeze(1)
    return mass.masked_fill(~banned, -torch.inf)


def inverse_cdf(
    probabilities: Tensor, uniforms: Tensor, cumulative: Tensor | None = None
) -> Tensor:
    """Return the token at which the cumulative probability first exceeds the uniform, int64 [b].

    ``probabilities``: float32 [b, V], at least one above 0 per row, with any sum. ``uniforms``:
    float64 [b] in [0, 1). The search uses two levels, blocks and tokens of a block, so that float64
    sums have few terms. A token of probability 0 is never returned.
    """
    if cumulative is None:
        cumulative = _cumulative(probabilities)
    target = uniforms.to(cumulative.device) * cumulative[:, -1]
    if probabilities.shape[1] <= _ONE_LEVEL:
        return _first_above(cumulative, target)
    blocks = _blocks(probabilities)
    block = _first_above(cumulative, target)
    previous = cumulative.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1)
    rows = torch.arange(blocks.shape[0], device=block.device)
    within = running_sum(blocks[rows, block].double())
    return block * _BLOCK + _first_above(within, target - previous.masked_fill(block == 0, 0.0))


def _cumulative(probabilities: Tensor) -> Tensor:
    """Return cumulative sums per token or, for a large vocabulary, per block, float64 [b, m]."""
    if probabilities.shape[1] <= _ONE_LEVEL:
        return running_sum(probabilities, torch.float64)
    return running_sum(_blocks(probabilities).sum(dim=-1).double())


def _blocks(probabilities: Tensor) -> Tensor:
    """Reshape [b, V], padded with zeros, to [b, V / `_BLOCK`, `_BLOCK`]."""
    rows, columns = probabilities.shape
    if columns % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -columns % _BLOCK))
    return probabilities.view(rows, -1, _BLOCK)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which ``cumulative`` [b, n] exceeds ``target`` [b] of 0 or more."""
    # Rounding can put a target at or above the total.
    below_total = cumulative[:, -1] * _BELOW_ONE
    limit = torch.minimum(target, below_total)[:, None]
    index = torch.searchsorted(cumulative, limit, right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)  # NaN sums give an index out of range


def _keep_threshold(
    scores: Tensor, top_k: int, top_p: float, may_wait: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the threshold [b] of the filter, and whether a nucleus is wide (`sample_tokens`)."""
    columns = scores.shape[1]
    if top_k > 0 or columns <= _NUCLEUS:
        return threshold(scores.clone(), top_k, top_p), None
    likeliest = scores.topk(_NUCLEUS, dim=1).values
    mass = running_sum((likeliest - scores.logsumexp(dim=1, keepdim=True)).exp())
    wide = mass[:, -2] <= top_p
    # For rows whose nucleus is within the candidates, the candidates suffice.
    limits = _nucleus_threshold(likeliest, mass, top_p)
    if not may_wait:
        return limits, wide.any()
    if bool(wide.any()):
        limits[wide] = threshold(scores[wide], 0, top_p)
    return limits, None


def _nucleus_threshold(likeliest: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """Compute `aligner.logprobs.top_k_top_p.threshold` from descending logits and their mass."""
    probability = torch.diff(mass, dim=1, prepend=torch.zeros_like(mass[:, :1]))
    count = ((mass - probability) < top_p).sum(dim=1, keepdim=True)
    smallest = likeliest.gather(1, (count - 1).clamp(0, likeliest.shape[1] - 1))
    next_lower = likeliest.masked_fill(likeliest >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    return (smallest - (smallest - next_lower).clamp(max=2.0) / 2).squeeze(1)
