"""Log-probs and entropy from hidden states, without logits [N, V] in memory.

Forward: one pass over tiles of the vocabulary updates, for each token, the running maximum ``m`` of
the logits ``l``, the sum ``s = Σ exp(l - m)`` and, for the entropy, ``u = Σ exp(l - m)·(l - m)``
(online softmax, Milakov & Gimelshein, 2018). Then ``logprob = l_target - m - log s`` and ``entropy
= log s - u / s``.

Backward: each tile is computed again and replaced by the gradient of its logits::

    dl_v = g·([v = target] - p_v) - e·p_v·(log p_v + entropy)

with ``g`` and ``e`` the gradients of logprob and entropy. The vocabulary is the outer loop. Each
row of the weight's gradient is therefore complete after its tile, and summed in float32.

Sums are float32 (float64 for float64 inputs). A GPU multiplies bfloat16 without conversion and
rounds the gradient of each logit to bfloat16 (`aligner.kernels.linear_product`). Other devices
convert states and weights to float32 block by block.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.kernels.linear_product import has_wide_products, wide_mm
from aligner.logprobs.output_layer import Tiles, VocabShard, soft_cap_
from aligner.logprobs.top_k_top_p import (
    EXCLUDED,
    Restriction,
    TrainingSamplingParams,
    restriction_of,
)
from aligner.parallel.collectives import gather_first, reduce_scatter_first


class RowStatistics(NamedTuple):
    """Results of the forward pass for N tokens, float32 [N] (float64 for float64 inputs)."""

    logprobs: Tensor  # of the targets
    log_normalizer: Tensor  # log Σ exp(l) over the tokens that top-k and top-p keep
    entropy: Tensor | None


def row_statistics(
    tiles: Tiles,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard,
    restriction: Restriction | None,
    *,
    keep_target: bool,
    with_entropy: bool,
) -> RowStatistics:
    """Compute log-probs of ``target``, int64 [N], and entropies.

    ``tiles``: partition of the logits of ``hidden`` [N, H] and ``weight`` [V_local, H].
    ``restriction``: tokens in the softmax, None for all. ``keep_target``: add an excluded target to
    the softmax. Otherwise its log-prob is -inf.
    """
    assert hidden.shape[:1] == target.shape, (hidden.shape, target.shape)
    # Logits of the targets, which also initialise the running maximum.
    hidden = tiles.factor(hidden)
    local, owned = shard.localize(target)
    target_logits = _target_logits(tiles, hidden, weight, local, owned, shard)
    # The running maximum can start at any number. The target's logit is near the final maximum.
    maximum = target_logits.clone()
    total = torch.zeros_like(maximum)
    weighted = torch.zeros_like(maximum) if with_entropy else None
    for columns in tiles.vocabulary():
        weight_tile = tiles.factor(weight[columns])
        for rows in tiles.tokens():
            logits = tiles.logits(hidden[rows], weight_tile)
            if restriction is not None:
                target_column, is_inside = _target_column(local[rows], owned[rows], columns)
                restriction.exclude(logits, rows, columns, target_column, is_inside)
            higher = torch.maximum(maximum[rows], logits.amax(dim=1))
            _rescale(maximum, total, weighted, rows, higher)
            _add_tile(tiles, logits, total, weighted, rows, higher)
    if shard.group is not None:
        # Sums of ranks can be added only relative to the same maximum.
        _rescale(maximum, total, weighted, slice(None), shard.maximum(maximum.clone()))
        sums = torch.stack([total] if weighted is None else [total, weighted])
        total, weighted = (*shard.sum(sums), None)[:2]
    if restriction is not None:
        if not keep_target:
            below = target_logits < restriction.thresholds
            target_logits = target_logits.masked_fill(below, -torch.inf)
        shifted = target_logits - maximum
        exponential = shifted.exp()
        total += exponential
        if weighted is not None:  # clamped, because a target at -inf adds 0, and 0 · -inf is NaN
            weighted += exponential * shifted.clamp(min=EXCLUDED)
    # Statistics from the complete sums.
    log_total = total.log()
    log_normalizer = maximum + log_total
    entropy = None if weighted is None else log_total - weighted / total
    return RowStatistics(target_logits - log_normalizer, log_normalizer, entropy)


def _target_logits(
    tiles: Tiles, hidden: Tensor, weight: Tensor, local: Tensor, owned: Tensor, shard: VocabShard
) -> Tensor:
    """Compute each target's logit, [N], on the rank that has its column, and sum over ranks."""
    if shard.columns == 0:  # this rank stores only padding
        return shard.sum(hidden.new_zeros(hidden.shape[0], dtype=tiles.dtype))
    logits = (hidden.to(tiles.dtype) * weight[local].to(tiles.dtype)).sum(dim=1)
    logits = logits if tiles.divisor == 1.0 else logits / tiles.divisor
    return shard.sum(torch.where(owned, soft_cap_(logits, tiles.cap), 0))


def _rescale(
    maximum: Tensor, total: Tensor, weighted: Tensor | None, rows: slice, higher: Tensor
) -> None:
    """Raise the running maximum of ``rows`` to ``higher``, and rescale their running sums."""
    shift = maximum[rows] - higher
    factor = shift.exp()
    if weighted is not None:
        weighted[rows] = factor * (weighted[rows] + shift * total[rows])
    total[rows] *= factor
    maximum[rows] = higher


def _add_tile(
    tiles: Tiles,
    logits: Tensor,
    total: Tensor,
    weighted: Tensor | None,
    rows: slice,
    maximum: Tensor,
) -> None:
    """Add a tile of logits [n, v] to the running sums of ``rows``. Overwrites the tile."""
    # In place and into one reused buffer, because both stay in the cache.
    shifted = logits.sub_(maximum.unsqueeze(1))
    if weighted is None:
        total[rows] += shifted.exp_().sum(dim=1)
        return
    exponential = torch.exp(shifted, out=tiles.buffer("exponential", *shifted.shape))
    total[rows] += exponential.sum(dim=1)
    weighted[rows] += shifted.mul_(exponential).sum(dim=1)


def _target_column(local: Tensor, owned: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return each target's column in a tile (0 if outside), and whether it is inside, [n, 1]."""
    column = local - columns.start
    is_inside = owned & (column >= 0) & (column < columns.stop - columns.start)
    return torch.where(is_inside, column, 0).unsqueeze(1), is_inside.unsqueeze(1)


class _LogitGradient(NamedTuple):
    """Factors [N] per token. The logits' gradient is ``row_factor`` times `_gradient_tile`."""

    log_normalizer: Tensor
    row_factor: Tensor
    entropy_scale: Tensor | None  # e, or None without a gradient through the entropy
    offset: Tensor | None  # g + e · entropy
    target_value: Tensor  # added to the target's column of the tile
    local_target: Tensor  # int64, row of the local weight
    owned: Tensor  # bool, the target is in this shard


def _logit_gradient(
    statistics: RowStatistics,
    target: Tensor,
    shard: VocabShard,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    restricted: bool,
) -> _LogitGradient:
    """Compute `_LogitGradient` from the gradients of log-probs and entropies, float [N] each."""
    logprobs, _, entropy = statistics
    local, owned = shard.localize(target)
    grad_logprobs = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs
    # With a filter, the tiles exclude the target. Its probability is therefore added separately.
    probability = logprobs.exp() if restricted else torch.zeros_like(logprobs)
    if grad_entropy is None or entropy is None:
        # dl = -g·(p - [v = target]). The tile is p, and -g multiplies hidden states [N, H].
        row_factor = -grad_logprobs
        offset = scale = None
        target_value = probability - 1
    else:
        # The factor of p_v depends on v, so that the tile includes all factors.
        row_factor = torch.ones_like(logprobs)
        scale = grad_entropy
        offset = grad_logprobs + grad_entropy * entropy
        surprise = grad_entropy * logprobs.clamp(min=EXCLUDED)
        target_value = grad_logprobs - probability * (offset + surprise)
    return _LogitGradient(
        statistics.log_normalizer,
        row_factor,
        scale,
        offset,
        # A target at -inf is excluded, so its logit gets no gradient.
        torch.where(owned & ~logprobs.isneginf(), target_value, 0),
        local,
        owned,
    )


def input_gradients(
    tiles: Tiles,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard,
    restriction: Restriction | None,
    statistics: RowStatistics,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    requires: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute gradients of ``hidden``, float [N, H], and of the local ``weight``, [V_local, H].

    The gradient of ``hidden`` is the summand of this vocabulary shard. ``requires``: which of the
    two to compute. ``grad_logprobs``, ``grad_entropy``: gradients of the outputs, float [N].
    """
    requires_hidden, requires_weight = requires
    gradient = _logit_gradient(
        statistics, target, shard, grad_logprobs, grad_entropy, restricted=restriction is not None
    )
    inputs = tiles.factor(hidden)
    row_factor = (gradient.row_factor / tiles.divisor).unsqueeze(1)
    # Row factors multiply the tiles if these are rounded, otherwise the hidden states.
    scaled = inputs if tiles.narrow else row_factor * inputs
    # Memory of the results. Padding rows of the weight have gradient 0.
    grad_hidden = torch.zeros_like(inputs, dtype=tiles.dtype) if requires_hidden else None
    grad_weight = torch.empty_like(weight) if requires_weight else None
    if grad_weight is not None:
        grad_weight[shard.columns :] = 0
    for columns in tiles.vocabulary():
        weight_tile = tiles.factor(weight[columns])
        accumulated: Tensor | None = None
        for rows in tiles.tokens():
            # Compute a tile again, and add its products to both gradients.
            tile = _gradient_tile(
                tiles, inputs[rows], weight_tile, gradient, restriction, rows, columns
            )
            if tiles.narrow:
                rounded = tiles.buffer("rounded", tile.shape[0], tile.shape[1], hidden.dtype)
                tile = torch.mul(tile, row_factor[rows], out=rounded)
            if grad_hidden is not None:
                _accumulate(grad_hidden[rows], tile, weight_tile)
            if requires_weight:  # summed over all tokens in float32, and rounded once below
                accumulated = _accumulate(accumulated, tile.t(), scaled[rows])
        if grad_weight is not None:
            grad_weight[columns] = 0 if accumulated is None else accumulated
    if grad_hidden is not None:
        if not tiles.narrow:
            grad_hidden.mul_(row_factor)
        grad_hidden = grad_hidden.to(hidden.dtype)
    return grad_hidden, grad_weight


def _accumulate(total: Tensor | None, lhs: Tensor, rhs: Tensor) -> Tensor:
    if total is not None and lhs.dtype == total.dtype:
        return total.addmm_(lhs, rhs)
    product = wide_mm(lhs, rhs)
    return product if total is None else total.add_(product)


def _gradient_tile(
    tiles: Tiles,
    hidden: Tensor,
    weight: Tensor,
    gradient: _LogitGradient,
    restriction: Restriction | None,
    rows: slice,
    columns: slice,
) -> Tensor:
    """Compute the gradient of a tile of logits [n, v], divided by ``gradient.row_factor``."""
    logits = tiles.logits(hidden, weight)
    slope = None if tiles.cap is None else 1 - (logits / tiles.cap).square()  # of the soft cap
    target_column, is_inside = _target_column(
        gradient.local_target[rows], gradient.owned[rows], columns
    )
    if restriction is not None:
        restriction.exclude(logits, rows, columns, target_column, is_inside)
    tile = logits.sub_(gradient.log_normalizer[rows].unsqueeze(1))
    if gradient.entropy_scale is None or gradient.offset is None:
        tile.exp_()
    else:
        # The tile is log p, and becomes -p·(e·log p + g + e·entropy).
        probability = torch.exp(tile, out=tiles.buffer("exponential", *tile.shape))
        tile.mul_(-gradient.entropy_scale[rows].unsqueeze(1))
        tile.sub_(gradient.offset[rows].unsqueeze(1)).mul_(probability)
    target_value = torch.where(is_inside, gradient.target_value[rows].unsqueeze(1), 0)
    tile.scatter_add_(1, target_column, target_value)
    return tile if slope is None else tile.mul_(slope)


class _HiddenStatesToLogprobs(torch.autograd.Function):
    """See `hidden_states_to_logprobs`. Hidden states gathered from ``group`` are not saved."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        shard: VocabShard,
        restriction: Restriction | None,
        group: dist.ProcessGroup | None,
        options: dict[str, bool],
        tiling: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        rows = gather_first(hidden, group)
        tiles = Tiles(rows, weight, shard.columns, **tiling)
        statistics = row_statistics(tiles, rows, weight, target, shard, restriction, **options)
        restricted = [None] * 3 if restriction is None else vars(restriction).values()
        ctx.save_for_backward(hidden, weight, target, *restricted, *statistics)
        ctx.shard, ctx.group, ctx.tiling = shard, group, tiling
        ctx.set_materialize_grads(False)  # backward is cheaper without a gradient of the entropy
        return statistics.logprobs, statistics.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, *saved = ctx.saved_tensors
        restriction = None if saved[0] is None else Restriction(*saved[:3])
        rows = gather_first(hidden, ctx.group)
        grad_hidden, grad_weight = input_gradients(
            Tiles(rows, weight, ctx.shard.columns, **ctx.tiling),
            rows,
            weight,
            target,
            ctx.shard,
            restriction,
            RowStatistics(*saved[3:]),
            *grads,
            requires=ctx.needs_input_grad[:2],
        )
        if grad_hidden is not None:
            grad_hidden = reduce_scatter_first(grad_hidden, ctx.group)
        return grad_hidden, grad_weight, *[None] * 6


def hidden_states_to_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard,
    sampling: TrainingSamplingParams,
    *,
    gather_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    kept_ids: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-prob of each target, and the entropy of the sampling distribution.

    Args:
        hidden: float [N, H], hidden states that predict the targets.
        weight: float [V_local, H], output layer, or this rank's rows of it.
        target: int64 [N], token ids.
        shard: part of the vocabulary in ``weight``. Padding rows have gradient 0.
        sampling: temperature, which divides the logits before ``cap`` bounds them, top-k and top-p.
            Probabilities are renormalised over the tokens that top-k and top-p keep.
        gather_group: with sequence parallelism, ranks that have equal parts of the rows of
            ``hidden``, in rank order. Each pass gathers the rows. Only local rows are saved.
        chunk_size: maximum number of tokens per tile. Default: as the memory limit allows.
        with_entropy: whether to compute the entropy.
        kept_ids: int [N, K], ids that top-k and top-p kept in sampling, padded with -1. A row with
            an id is renormalised over these ids.
        cap: soft cap of the logits (see `soft_cap_`).

    Returns log-probs [N] and entropies [N] or None, float32 (float64 for float64 inputs). Gradients
    are exact for fixed kept tokens, but those of logits are rounded to bfloat16 if a GPU multiplies
    bfloat16. With tensor parallelism every rank returns the same values. The gradient of ``hidden``
    is then a summand, which the caller sums over the group, unless ``gather_group`` is given.
    """
    assert hidden.ndim == weight.ndim == 2, (hidden.shape, weight.shape)
    assert hidden.shape[1] == weight.shape[1], (hidden.shape, weight.shape)
    divisor = 1.0
    if has_wide_products(hidden, weight):
        divisor = sampling.temperature
    elif sampling.temperature != 1.0:
        # In float32, because scaled bfloat16 states would be rounded.
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32)) / sampling.temperature
    restriction = None
    if sampling.restricts:
        rows = gather_first(hidden.detach(), gather_group)
        restriction = restriction_of(rows, weight, shard, sampling, divisor, kept_ids, cap)
    options = {"keep_target": sampling.keep_target, "with_entropy": with_entropy}
    tiling = {"chunk_size": chunk_size, "divisor": divisor, "cap": cap}
    return _HiddenStatesToLogprobs.apply(
        hidden, weight, target, shard, restriction, gather_group, options, tiling
    )
