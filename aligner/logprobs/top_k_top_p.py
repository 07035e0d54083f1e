"""Top-k and top-p (nucleus) filters as one threshold per token.

The tokens kept are those whose logit is at least the threshold, so a pass over the vocabulary in
tiles can apply it without sorting again. Tokens of equal logit are kept or dropped together.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.distributed.collectives import gather_first
from aligner.kernels.linear_product import wide_mm
from aligner.logprobs.vocab_sequence_exchange import all_to_all_vp2sq
from aligner.logprobs.vocab_shard import Tiles, VocabShard

# Of the logits that exist at a time; sorting them takes several times as much.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 256 * 2**20


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
        before = probabilities.cumsum(dim=1) - probabilities
        count = (before < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    smallest = ordered.gather(1, count - 1)
    next_lower = logits.masked_fill_(logits >= smallest, -torch.inf).amax(dim=1, keepdim=True)
    # Nothing lower: the gap is infinite and any distance does. A padding column among those kept:
    # all others are kept, too.
    limit = smallest - (smallest - next_lower).clamp(max=2.0) / 2
    return torch.where(smallest.isneginf(), smallest, limit).squeeze(1)
