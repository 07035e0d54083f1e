"""Temperature, top-k and top-p (nucleus) filters for the log-probs of training.

The filters become a threshold for each position. A token is kept if its logit is at least the
threshold. A pass over tiles of the vocabulary can therefore apply the filters without sorting.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.kernels.linear_product import running_sum, wide_mm
from aligner.logprobs.output_layer import Tiles, VocabShard, soft_cap_
from aligner.logprobs.vocab_sequence_exchange import all_to_all_vp2sq
from aligner.parallel.collectives import gather_first

# Maximum size of the logits in memory. Sorting needs several times this memory.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 256 * 2**20
# Value of an excluded logit. Not -inf, because 0 · -inf would be NaN in the entropy.
EXCLUDED = -1e30


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Sampling parameters of a rollout, for log-probs under the distribution of the samples.

    ``top_k``: None, 0 or -1 is off. ``top_p``: 1 is off. ``temperature``: divisor of the logits.
    ``keep_target``: a target that the filters exclude counts as kept, with a finite log-prob, as
    in this library's trainers. By default its log-prob is -inf, as in NeMo-RL.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0
    keep_target: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} must be positive, because log-probs at "
                "temperature 0 are undefined. Set temperature=1 (and sample greedily if needed)"
            )
        if (self.top_k or 0) < -1 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_k={self.top_k} or top_p={self.top_p} is invalid. Set top_k to a positive "
                "number, or to None, 0 or -1 (off), and top_p to a number in (0, 1] (1 is off)"
            )

    @property
    def kept_count(self) -> int:
        """Top-k as an integer, 0 if top-k is off."""
        return max(self.top_k or 0, 0)

    @cached_property
    def restricts(self) -> bool:
        """True if the filter excludes tokens."""
        return self.kept_count > 0 or self.top_p < 1.0


@dataclass(frozen=True)
class Restriction:
    """Tokens in the softmax at N positions. The target of a position is always included.

    ``thresholds``: float [N], tokens with smaller logits are excluded. ``kept_columns``: int64
    [N, K], columns of the local shard that sampling kept. Columns outside the shard are padding.
    ``is_recorded``: bool [N], True for rows in which ``kept_columns`` replaces the threshold.
    """

    thresholds: Tensor
    kept_columns: Tensor | None = None
    is_recorded: Tensor | None = None

    def exclude(
        self, logits: Tensor, rows: slice, columns: slice, target_column: Tensor, is_inside: Tensor
    ) -> None:
        """Set excluded tokens and targets in a tile of logits [n, v] to `EXCLUDED`.

        ``rows``, ``columns``: slices of the tile. ``target_column``: int64 [n, 1], column of each
        target in the tile. ``is_inside``: bool [n, 1], the target is in the tile. Targets are
        excluded, because their logits are added separately, with another rounding.
        """
        logits.masked_fill_(logits < self.thresholds[rows].unsqueeze(1), EXCLUDED)
        if self.kept_columns is not None and self.is_recorded is not None:
            width = logits.shape[1]
            kept_column = self.kept_columns[rows] - columns.start
            # Columns outside this tile go to an additional column, which is dropped.
            in_tile = (kept_column >= 0) & (kept_column < width)
            kept_column = torch.where(in_tile, kept_column, width)
            shape = len(kept_column), width + 1
            excluded = torch.ones(shape, dtype=torch.bool, device=logits.device)
            excluded = excluded.scatter_(1, kept_column, False)[:, :width]
            logits.masked_fill_(excluded & self.is_recorded[rows].unsqueeze(1), EXCLUDED)
        target_logits = torch.where(is_inside, EXCLUDED, logits.gather(1, target_column))
        logits.scatter_(1, target_column, target_logits)


@torch.no_grad()
def restriction_of(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    sampling: TrainingSamplingParams,
    divisor: float,
    kept_ids: Tensor | None,
    cap: float | None = None,
) -> Restriction:
    """Return which tokens the filters of ``sampling`` keep for hidden states [N, H].

    Logits are divided by ``divisor`` and bounded by ``cap``. ``kept_ids``: int [N, K], token ids
    that sampling kept, padded with -1. For rows without an id, kept tokens are computed from the
    trainer's logits.

    Computed tokens can differ from those in sampling if engines round differently or weights have
    changed. With ``kept_ids``, ratios and KL are exact (keep sampling mask, DeepSeek-V3.2, 2025).
    """
    top_k, top_p = sampling.kept_count, sampling.top_p
    if kept_ids is None:
        return Restriction(keep_thresholds(hidden, weight, shard, top_k, top_p, divisor, cap))
    is_recorded = (kept_ids >= 0).any(dim=1)
    missing = (~is_recorded).nonzero().squeeze(1)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    thresholds = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=dtype)
    if len(missing):
        rows = hidden[missing]
        thresholds[missing] = keep_thresholds(rows, weight, shard, top_k, top_p, divisor, cap)
    local = torch.where(kept_ids >= 0, kept_ids.long() - shard.start, -1)
    return Restriction(thresholds, local, is_recorded)


def keep_thresholds(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    top_k: int,
    top_p: float,
    divisor: float = 1.0,
    cap: float | None = None,
) -> Tensor:
    """Compute the `threshold` of each row's logits, float [N], from ``hidden`` [N, H].

    Logits are divided by ``divisor`` and bounded by ``cap``. Only the logits of a few tokens are in
    memory at a time.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    budget = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES_ACCELERATOR)
    rows = max(1, budget // (weight.shape[0] * dtype.itemsize))
    thresholds = [hidden.new_empty(0, dtype=dtype)]
    for chunk in hidden.split(rows) if hidden.shape[0] else ():
        # With columns for padding rows, because ranks exchange equal numbers of columns.
        logits = hidden.new_full((chunk.shape[0], weight.shape[0]), -torch.inf, dtype=dtype)
        tiles = Tiles(chunk, weight, shard.columns, None)
        states = tiles.factor(chunk)
        for columns in tiles.vocabulary():
            logits[:, columns] = wide_mm(states, tiles.factor(weight[columns]).t())
        if divisor != 1.0:
            logits /= divisor
        soft_cap_(logits, cap)
        thresholds.append(shard_thresholds(logits, shard.group, top_k, top_p))
    return torch.cat(thresholds)


def shard_thresholds(
    logits: Tensor, group: dist.ProcessGroup | None, top_k: int, top_p: float
) -> Tensor:
    """Compute the `threshold` of each row, [n], on every rank. Overwrites ``logits`` [n, V_local].

    Each rank sorts complete rows of a part of the tokens. Padding columns must be -inf.
    """
    if group is None:
        return threshold(logits, top_k, top_p)
    rows = logits.shape[0]
    padded = F.pad(logits, (0, 0, 0, -rows % dist.get_world_size(group)))
    local_thresholds = threshold(all_to_all_vp2sq(padded, group), top_k, top_p)
    return gather_first(local_thresholds, group)[:rows]


def threshold(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Compute, for each row of [n, V], the lower bound of logits that top-k, then top-p keep.

    Top-p keeps the fewest most probable tokens whose total probability is at least ``top_p``. The
    threshold is midway between the smallest kept and the next lower logit, so that small rounding
    errors do not matter. Overwrites ``logits``.
    """
    columns = logits.shape[1]
    top_count = min(top_k, columns) if top_k > 0 else columns
    ordered = logits.topk(top_count, dim=1).values
    count = torch.full_like(ordered[:, :1], top_count, dtype=torch.int64)
    if top_p < 1.0:
        probabilities = ordered.softmax(dim=1)
        # The token with which the sum reaches top_p is kept: compare the sum before each token.
        preceding = running_sum(probabilities) - probabilities
        count = (preceding < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    smallest = ordered.gather(1, count - 1)
    next_lower = logits.masked_fill_(logits >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    # Without a lower logit, the gap is infinite and any distance is valid. If a padding column is
    # kept, all columns are kept.
    limit = smallest - (smallest - next_lower).clamp(max=2.0) / 2
    return torch.where(smallest.isneginf(), smallest, limit).squeeze(1)
