"""Sampling that training log-probs must match: top-k and top-p (nucleus) filters, temperature.

Filters are one threshold per token.

The tokens kept are those whose logit is at least the threshold, so a pass over the vocabulary in
tiles can apply it without sorting again. Tokens of equal logit are kept or dropped together.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.kernels.linear_product import wide_mm
from aligner.kernels.running_sum import running_sum
from aligner.logprobs.output_layer import Tiles, VocabShard
from aligner.logprobs.vocab_sequence_exchange import all_to_all_vp2sq
from aligner.parallel.collectives import gather_first

# Of the logits that exist at a time; sorting them takes several times as much.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 256 * 2**20


# Stands for a logit that the filter excludes. Not -inf: 0 · -inf would be NaN in the entropy.
EXCLUDED = -1e30


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Sampling parameters of a rollout, for log-probs of the same distribution.

    ``top_k``: None, 0 or -1 is off. ``top_p``: 1 is off. ``temperature`` divides the logits here,
    so logits must not have been divided before.

    ``keep_target``: treatment of a target that the filter excludes. False, the published
    behaviour: its log-prob is -inf. True, that of this library's own trainers: it counts as kept,
    so that a token which the filter would exclude by now has a finite log-prob.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0
    keep_target: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} must be positive: log-probs at temperature 0 do "
                "not exist; sample greedily and train at temperature 1"
            )
        if (self.top_k or 0) < -1 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_k={self.top_k} must be None, 0 or -1 (off) or positive, and "
                f"top_p={self.top_p} in (0, 1] (1: off)"
            )

    @property
    def kept_count(self) -> int:
        """Top-k as a number, 0 where it is off."""
        return max(self.top_k or 0, 0)

    @property
    def restricts(self) -> bool:
        """True if some tokens are left out."""
        return self.kept_count > 0 or self.top_p < 1.0


@dataclass(frozen=True)
class Restriction:
    """The tokens that count beside each target, of ``N`` of them.

    ``thresholds``: float [N], logits below it are excluded. ``kept``: int64 [N, K], columns of the
    local shard that the sampler kept, a number outside it where there is none; None: not recorded.
    ``is_recorded``: bool [N], rows of which ``kept`` speaks.
    """

    thresholds: Tensor
    kept: Tensor | None = None
    is_recorded: Tensor | None = None

    def exclude(
        self, logits: Tensor, rows: slice, columns: slice, column: Tensor, here: Tensor
    ) -> None:
        """Overwrite what is excluded of a tile [n, v] of ``rows`` and ``columns``, and the targets.

        ``column``: int64 [n, 1], places of the targets in the tile, where ``here``, bool [n, 1].
        They are counted by themselves: were they compared like the rest, two roundings of a logit
        (tile and dot product) could fall on either side of the threshold and count it twice or
        never.
        """
        logits.masked_fill_(logits < self.thresholds[rows].unsqueeze(1), EXCLUDED)
        if self.kept is not None and self.is_recorded is not None:
            width = logits.shape[1]
            place = self.kept[rows] - columns.start
            # Those of other tiles and shards go to a column of their own, which is dropped.
            place = torch.where((place >= 0) & (place < width), place, width)
            excluded = torch.ones(len(place), width + 1, dtype=torch.bool, device=logits.device)
            excluded = excluded.scatter_(1, place, False)[:, :width]
            logits.masked_fill_(excluded & self.is_recorded[rows].unsqueeze(1), EXCLUDED)
        logits.scatter_(1, column, torch.where(here, EXCLUDED, logits.gather(1, column)))

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The fields, for autograd to keep."""
        return self.thresholds, self.kept, self.is_recorded


@torch.no_grad()
def restriction_of(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    sampling: TrainingSamplingParams,
    divisor: float,
    kept_ids: Tensor | None,
) -> Restriction | None:
    """The restriction of ``hidden`` [N, H]; None: every token counts. Logits are over ``divisor``.

    ``kept_ids``: int [N, K], global ids that the sampler kept, -1 where there are fewer; a row of
    -1 was not recorded and is found again. None: all are found again.

    Found again from the trainer's own logits, the set differs from the sampler's at its edge: where
    engines round otherwise, where the weights have moved, and always for the reference. Both then
    renormalise over other sets. Over the recorded one ratios and KL are exact (keep sampling mask,
    DeepSeek-V3.2, 2025).
    """
    if not sampling.restricts:
        return None
    top_k, top_p = sampling.kept_count, sampling.top_p
    if kept_ids is None:
        return Restriction(keep_thresholds(hidden, weight, shard, top_k, top_p, divisor))
    is_recorded = (kept_ids >= 0).any(dim=1)
    missing = (~is_recorded).nonzero().squeeze(1)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    thresholds = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=dtype)
    if len(missing):
        found = keep_thresholds(hidden[missing], weight, shard, top_k, top_p, divisor)
        thresholds[missing] = found
    local = torch.where(kept_ids >= 0, kept_ids.long() - shard.start, -1)
    return Restriction(thresholds, local, is_recorded)


def keep_thresholds(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    top_k: int,
    top_p: float,
    divisor: float = 1.0,
) -> Tensor:
    """Threshold of each row's logits over ``divisor``, float [N], for ``hidden`` [N, H].

    The logits exist a few tokens at a time.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    budget = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES_ACCELERATOR)
    rows = max(1, budget // (weight.shape[0] * dtype.itemsize))
    thresholds = [hidden.new_empty(0, dtype=dtype)]
    for chunk in hidden.split(rows) if hidden.shape[0] else ():
        # As wide as the weight, padding rows included: ranks exchange as many columns each.
        logits = hidden.new_full((chunk.shape[0], weight.shape[0]), -torch.inf, dtype=dtype)
        tiles = Tiles(chunk, weight, shard.columns, None)
        states = tiles.factor(chunk)
        for columns in tiles.vocabulary():
            logits[:, columns] = wide_mm(states, tiles.factor(weight[columns]).t())
        if divisor != 1.0:
            logits /= divisor
        thresholds.append(shard_thresholds(logits, shard.group, top_k, top_p))
    return torch.cat(thresholds)


def shard_thresholds(
    logits: Tensor, group: dist.ProcessGroup | None, top_k: int, top_p: float
) -> Tensor:
    """Threshold of each row, [n], on every rank; ``logits`` float [n, V_local], overwritten.

    Sorting needs whole rows: each rank gets those of its share of the tokens. All ranks hold the
    same number of columns; those that are padding must be -inf.
    """
    if group is None:
        return threshold(logits, top_k, top_p)
    rows = logits.shape[0]
    padded = F.pad(logits, (0, 0, 0, -rows % dist.get_world_size(group)))
    own = threshold(all_to_all_vp2sq(padded, group), top_k, top_p)
    return gather_first(own, group)[:rows]


def threshold(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Threshold of each row of float [n, V]; top-k first, top-p over what it leaves.

    Top-p keeps the fewest most probable tokens whose probability adds up to ``top_p`` or more.
    The threshold lies midway between the last token kept and the next lower logit, so that logits
    computed again with other rounding fall on the same side. Overwrites ``logits``.
    """
    columns = logits.shape[1]
    kept = min(top_k, columns) if top_k > 0 else columns
    ordered = logits.topk(kept, dim=1).values
    count = torch.full_like(ordered[:, :1], kept, dtype=torch.int64)
    if top_p < 1.0:
        probabilities = ordered.softmax(dim=1)
        # The token that crosses top_p is kept too, so each counts what comes before it.
        before = running_sum(probabilities) - probabilities
        count = (before < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    smallest = ordered.gather(1, count - 1)
    next_lower = logits.masked_fill_(logits >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    # Nothing lower: the gap is infinite and any distance does. A padding column among those kept:
    # all others are kept, too.
    limit = smallest - (smallest - next_lower).clamp(max=2.0) / 2
    return torch.where(smallest.isneginf(), smallest, limit).squeeze(1)
