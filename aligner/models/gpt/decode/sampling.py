"""Sampling of the next token.

The uniform number of a token is a hash of (seed, sample id, position), independent of batch, slots
and ranks. The token is the inverse CDF at that number over the vocabulary in id order.

The log-prob of a token is that of the distribution from which it is drawn: temperature, then top-k,
then top-p, renormalised over the kept tokens, as in training (`aligner.logprobs.top_k_top_p`). A
ban of end tokens before ``min_length`` changes the log-prob only if it changes which tokens top-k
and top-p keep (as in vLLM). A repetition penalty changes the log-prob. Log-probs that training
computes anew do not contain the penalty.

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

_BLOCK = 128  # tokens in a block. Probabilities are summed within blocks, then over blocks.
_ONE_LEVEL = 2048  # largest vocabulary that is summed without blocks
_BELOW_ONE = 1.0 - 2.0**-53  # a float64 times this is, rounded, the next smaller float64
# Number of most likely tokens in which the top-p nucleus is searched first. If the nucleus contains
# more tokens, the full row is sorted.
_NUCLEUS = 1024


class SampledTokens(NamedTuple):
    """Sampled tokens of b rows."""

    tokens: Tensor  # int64 [b]
    logprobs: Tensor  # float32 [b], under the distribution of the draw
    wide: Tensor | None = None  # bool [], see `sample_tokens`. None is False
    # int32 [b, k], ids that top-k and top-p kept, padded with -1, all -1 for more than k ids. None
    # if not recorded.
    kept_ids: Tensor | None = None


def counter_uniforms(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [b], the same on all devices.

    Equal seed, sample id and position give an equal number. ``sample_ids``: int64 [b].
    ``positions``: int64 [b], index of each token in its sequence.
    """
    state = counter_hash(seed, sample_ids, positions)
    return uniform_bits(state).double() * 2.0**-UNIFORM_BITS


def penalise_repetition(logits: Tensor, history_mask: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty of CTRL (Keskar et al. 2019) as Hugging Face does.

    ``logits``: float [b, V], before temperature. ``history_mask``: bool [b, V], true for tokens in
    the prompt or response. Their positive logits are divided by ``penalty``, negative logits are
    multiplied by it.
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

    ``logits``: float [b, V], without padding columns, may be overwritten. ``uniforms``: float64 [b]
    in [0, 1). ``greedy``: choose the most likely token (of equals the smallest id), with its
    log-prob under ``sampling``. ``history_mask``: bool [b, V], true for tokens in the prompt or
    response, required for a repetition penalty. ``banned``: bool [b], rows in which the end tokens
    ``end_ids``, int64 [e], are not drawn. ``record``: maximum number of kept ids to return.

    With ``may_wait`` the host reads the device and checks the result. Otherwise the caller must
    later call `check_finite`. If ``wide`` is then true, the top-p nucleus of a row exceeds the
    candidates, and the caller must draw again with ``may_wait``.

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
    """Return the ids of tokens whose ``scores`` [b, V] are above -inf (see `SampledTokens`)."""
    best = scores.topk(min(limit, scores.shape[1]), dim=1)
    too_many = (~scores.isneginf()).sum(1, keepdim=True) > limit
    ids = best.indices.masked_fill(best.values.isneginf() | too_many, -1).int()
    return torch.nn.functional.pad(ids, (0, limit - ids.shape[1]), value=-1)


def check_finite(logprobs: Tensor) -> None:
    """Raise NonFiniteError if log-probs [b] are not finite. Synchronises with the host."""
    if not math.isfinite(logprobs.sum().item()):
        bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
        raise NonFiniteError(
            f"logits of rows {bad} are not finite, because weights are NaN or infinite. Find the "
            "training step with the first non-finite loss or gradient, and lower its learning rate"
        )


def _ban(scores: Tensor, banned: Tensor, end_ids: Tensor) -> Tensor:
    """Set scores of ``end_ids`` to -inf in ``banned`` rows. Return their log-sum-exp [b]."""
    end_scores = scores[:, end_ids]
    scores[:, end_ids] = end_scores.masked_fill(banned[:, None], -torch.inf)
    mass = end_scores.double()
    mass = mass.logsumexp(dim=1) if len(end_ids) > 1 else mass.squeeze(1)
    return mass.masked_fill(~banned, -torch.inf)


def inverse_cdf(
    probabilities: Tensor, uniforms: Tensor, cumulative: Tensor | None = None
) -> Tensor:
    """Return the first token whose cumulative probability exceeds the uniform number, int64 [b].

    ``probabilities``: float32 [b, V], with any positive sum per row. ``uniforms``: float64 [b] in
    [0, 1). A token of probability 0 is never returned. In a large vocabulary, the block of the
    token is searched first, then the token in the block, so that sums have few terms.
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
    """Return cumulative sums over tokens, or over blocks of a large vocabulary, float64 [b, m]."""
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
    """Return the first index at which ``cumulative`` [b, n] exceeds ``target`` [b] >= 0."""
    # Rounding can put a target at or above the total.
    below_total = cumulative[:, -1] * _BELOW_ONE
    limit = torch.minimum(target, below_total)[:, None]
    index = torch.searchsorted(cumulative, limit, right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)  # NaN sums give an index out of range


def _keep_threshold(
    scores: Tensor, top_k: int, top_p: float, may_wait: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the score [b] from which on tokens are kept, and ``wide`` (see `sample_tokens`)."""
    columns = scores.shape[1]
    if top_k > 0 or columns <= _NUCLEUS:
        return threshold(scores.clone(), top_k, top_p), None
    likeliest = scores.topk(_NUCLEUS, dim=1).values
    mass = running_sum((likeliest - scores.logsumexp(dim=1, keepdim=True)).exp())
    wide = mass[:, -2] <= top_p
    # These limits are right for rows whose nucleus is within the candidates.
    limits = _nucleus_threshold(likeliest, mass, top_p)
    if not may_wait:
        return limits, wide.any()
    if bool(wide.any()):
        limits[wide] = threshold(scores[wide], 0, top_p)
    return limits, None


def _nucleus_threshold(likeliest: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """Compute `threshold` from the largest logits and their cumulative probabilities ``mass``."""
    probability = torch.diff(mass, dim=1, prepend=torch.zeros_like(mass[:, :1]))
    count = ((mass - probability) < top_p).sum(dim=1, keepdim=True)
    smallest = likeliest.gather(1, (count - 1).clamp(0, likeliest.shape[1] - 1))
    next_lower = likeliest.masked_fill(likeliest >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    return (smallest - (smallest - next_lower).clamp(max=2.0) / 2).squeeze(1)
