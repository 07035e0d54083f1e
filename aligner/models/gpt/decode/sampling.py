"""Sampling of the next token.

Sampling is counter-based: the uniform number behind a token is a hash of (seed, sample id,
position), so it does not depend on what else is in the batch, on slots, or on ranks. The token is
the inverse CDF of that number over the vocabulary in id order.

The log-prob that comes with a token is that of the distribution the token was drawn from:
temperature applied and top-k, then top-p, renormalised over the tokens kept, the trainer's own
convention (`aligner.logprobs.top_k_top_p`). Two things the trainer does not know: the ban of
end-of-sequence tokens before ``min_length`` is left out of the log-prob (as vLLM does), so that it
is the policy's own, unless top-k or top-p is on, whose filter the ban changes; a repetition
penalty is part of it, so with one the recorded log-probs differ from recomputed ones.

Shape legend: ``b`` rows, ``V`` vocabulary without padding columns.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config import SamplingParams
from aligner.errors import NonFiniteError
from aligner.kernels.counter_hash import UNIFORM_BITS, counter_hash, uniform_bits
from aligner.kernels.running_sum import running_sum
from aligner.logprobs.top_k_top_p import threshold

_BLOCK = 128  # probabilities are added up in blocks of this many tokens,
_ONE_LEVEL = 2048  # unless the vocabulary is as small as this
_BELOW_ONE = 1.0 - 2.0**-53  # times any float64 is, rounded, the next number below it
_NUCLEUS = 1024  # this many tokens nearly always hold a nucleus; else the row is sorted whole


class SampledTokens(NamedTuple):
    """``tokens`` int64 [b]; ``logprobs`` float32 [b], of the distribution drawn from.

    ``wide``: bool [], see `sample_tokens`; None: never. ``kept``: int32 [b, k], ids of the tokens
    that top-k and top-p left, -1 where there are fewer, all -1 where there are more; None: not
    asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    wide: Tensor | None = None
    kept: Tensor | None = None


def counter_uniforms(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [b], from integers only: the same on every device.

    Args:
        seed: of the run and step.
        sample_ids: int64 [b].
        positions: int64 [b], the index of the token in its sequence.
    """
    state = counter_hash(seed, sample_ids, positions)
    return uniform_bits(state).double() * 2.0**-UNIFORM_BITS


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Repetition penalty of CTRL (Keskar et al. 2019, as Hugging Face has it).

    Logits of tokens that occurred before are divided by ``penalty`` where positive and multiplied
    where negative; it applies to the raw logits, before the temperature.

    Args:
        logits: float [b, V].
        seen: bool [b, V], True where the token occurs in the prompt or the response so far.
        penalty: above 1 discourages repetition.
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    sampling: SamplingParams,
    *,
    greedy: bool,
    seen: Tensor | None = None,
    banned: Tensor | None = None,
    end_ids: Tensor | None = None,
    waits: bool = True,
    record: int = 0,
) -> SampledTokens:
    """Draw one token per row.

    With ``waits`` the host reads what it must know. Without, it is left to the caller, later, to
    `check_finite` the log-probs, and to draw again with ``waits`` where ``wide`` is true: some
    row's nucleus had more tokens than were looked at.

    Args:
        logits: float [b, V], padding columns cut off; its memory may be used for the result.
        uniforms: float64 [b] in [0, 1) (`counter_uniforms`); not used when ``greedy``.
        sampling: temperature, top-k, top-p, repetition penalty.
        greedy: take the likeliest token (the first of equals); its log-prob is of ``sampling``.
        seen: bool [b, V], tokens that occurred; required for a repetition penalty other than 1.
        banned: bool [b], rows in which ``end_ids`` cannot be drawn.
        end_ids: int64 [e], the end-of-sequence tokens; needed with ``banned``.
        waits: whether the host may wait for the device.
        record: most tokens of what top-k and top-p keep that are returned; 0: none are.

    Raises:
        NonFiniteError: the logits of a row are NaN, or infinite so that no distribution is left.
    """
    scores = logits.float()
    if sampling.repetition_penalty != 1.0:
        assert seen is not None
        scores = penalise_repetition(scores, seen, sampling.repetition_penalty)
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    allowed = None
    if banned is not None and end_ids is not None and end_ids.numel() > 0:
        allowed = _ban(scores, banned, end_ids)
    wide = kept = None
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        limit, wide = _keep_threshold(scores, sampling.top_k, sampling.top_p, waits)
        scores = scores.masked_fill(scores < limit[:, None], -torch.inf)
        kept = _kept_ids(scores, record) if record else None
        allowed = None
    probabilities = scores.softmax(dim=-1)
    cumulative = _cumulative(probabilities)
    tokens = scores.argmax(dim=-1) if greedy else inverse_cdf(probabilities, uniforms, cumulative)
    chosen = probabilities.gather(1, tokens[:, None]).squeeze(1).double()
    # torch's float32 softmax adds up a row one by one: over 49,152 tokens its probabilities are off
    # by a common factor, up to 1e-4 away from 1. Their accurate sum takes it out again.
    logprobs = chosen.log() - cumulative[:, -1].log()
    if allowed is not None:
        normalizer = scores.gather(1, tokens[:, None]).squeeze(1).double() - logprobs
        logprobs = logprobs - torch.logaddexp(normalizer, allowed) + normalizer
    if waits:
        check_finite(logprobs)
    return SampledTokens(tokens, logprobs.float(), wide, kept)


def _kept_ids(scores: Tensor, most: int) -> Tensor:
    """Ids of the tokens above -inf in float [b, V], int32 [b, most]; see `SampledTokens`."""
    best = scores.topk(min(most, scores.shape[1]), dim=1)
    too_many = (~scores.isneginf()).sum(1, keepdim=True) > most
    ids = best.indices.masked_fill(best.values.isneginf() | too_many, -1).int()
    return torch.nn.functional.pad(ids, (0, most - ids.shape[1]), value=-1)


def check_finite(logprobs: Tensor) -> None:
    """Refuse log-probs [b] that came of logits that are no numbers; the host reads them.

    Raises:
        NonFiniteError: as in `sample_tokens`.
    """
    if not math.isfinite(logprobs.sum().item()):
        bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
        raise NonFiniteError(
            f"logits of rows {bad} are not finite, nothing can be sampled from them; the weights "
            "are damaged (look for the step at which the loss or gradient stopped being finite)"
        )


def _ban(scores: Tensor, banned: Tensor, end_ids: Tensor) -> Tensor:
    """Take ``end_ids`` out of the rows ``banned``, in place.

    Returns their log-sum-exp before, float64 [b], -inf in the other rows.
    """
    before = scores[:, end_ids]
    scores[:, end_ids] = before.masked_fill(banned[:, None], -torch.inf)
    mass = before.double()
    mass = mass.logsumexp(dim=1) if len(end_ids) > 1 else mass.squeeze(1)
    return mass.masked_fill(~banned, -torch.inf)


def inverse_cdf(
    probabilities: Tensor, uniforms: Tensor, cumulative: Tensor | None = None
) -> Tensor:
    """The token at which the cumulative probability first exceeds the uniform number, int64 [b].

    Two levels, blocks and the tokens of one block, so that the float64 sums run over few numbers.
    A token of probability 0 is never returned, whatever the rounding.

    Args:
        probabilities: float32 [b, V], at least one above 0 per row; need not add up to 1.
        uniforms: float64 [b] in [0, 1).
        cumulative: `_cumulative` of the probabilities, where it is known.
    """
    if cumulative is None:
        cumulative = _cumulative(probabilities)
    target = uniforms.to(cumulative.device) * cumulative[:, -1]
    if probabilities.shape[1] <= _ONE_LEVEL:
        return _first_above(cumulative, target)
    blocks = _blocks(probabilities)
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1)
    rows = torch.arange(blocks.shape[0], device=block.device)
    within = running_sum(blocks[rows, block].double())
    return block * _BLOCK + _first_above(within, target - before.masked_fill(block == 0, 0.0))


def _cumulative(probabilities: Tensor) -> Tensor:
    """Sums up to each token or, over a larger vocabulary, each block of tokens; float64 [b, m]."""
    if probabilities.shape[1] <= _ONE_LEVEL:
        return running_sum(probabilities, torch.float64)
    return running_sum(_blocks(probabilities).sum(dim=-1).double())


def _blocks(probabilities: Tensor) -> Tensor:
    """[b, V] with zeros added at the end to [b, V / `_BLOCK`, `_BLOCK`]."""
    rows, columns = probabilities.shape
    if columns % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -columns % _BLOCK))
    return probabilities.view(rows, -1, _BLOCK)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index where ``cumulative`` [b, n] exceeds ``target`` [b] at least 0.

    A target beyond the total, which only rounding makes, is taken as the largest number below the
    total: the index is then that of the last step up, so it never points at an added zero.
    """
    below_total = cumulative[:, -1] * _BELOW_ONE
    limit = torch.minimum(target, below_total)[:, None]
    index = torch.searchsorted(cumulative, limit, right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)  # beyond it where the sums are NaN


def _keep_threshold(
    scores: Tensor, top_k: int, top_p: float, waits: bool
) -> tuple[Tensor, Tensor | None]:
    """Threshold of the top-k/top-p filter, [b]; a nucleus is found without sorting the vocabulary.

    Without ``waits`` also bool []: in some row it was not found.
    """
    columns = scores.shape[1]
    if top_k > 0 or columns <= _NUCLEUS:
        return threshold(scores.clone(), top_k, top_p), None
    likeliest = scores.topk(_NUCLEUS, dim=1).values
    mass = running_sum((likeliest - scores.logsumexp(dim=1, keepdim=True)).exp())
    wide = mass[:, -2] <= top_p
    # Rows whose nucleus lies within: to `threshold` the rest of the vocabulary is one more token.
    limits = _nucleus_threshold(likeliest, mass, top_p)
    if not waits:
        return limits, wide.any()
    if bool(wide.any()):
        limits[wide] = threshold(scores[wide], 0, top_p)
    return limits, None


def _nucleus_threshold(likeliest: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """As `aligner.logprobs.top_k_top_p.threshold`, from descending logits and their mass."""
    probability = torch.diff(mass, dim=1, prepend=torch.zeros_like(mass[:, :1]))
    count = ((mass - probability) < top_p).sum(dim=1, keepdim=True)
    smallest = likeliest.gather(1, (count - 1).clamp(0, likeliest.shape[1] - 1))
    next_lower = likeliest.masked_fill(likeliest >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    return (smallest - (smallest - next_lower).clamp(max=2.0) / 2).squeeze(1)
