"""Rollouts without groups that teach nothing (DAPO's dynamic sampling; Yu et al., 2025).

Where all responses to a prompt earn the same, their advantages are 0. Such groups are replaced by
those of further prompts, so that every update learns from as many samples.
"""

from collections.abc import Callable

import torch

from aligner.algorithms.group_advantages import has_signal
from aligner.distributed.batched_data_dict import BatchedDataDict


def fill_with_signal(
    draw: Callable[[], BatchedDataDict],
    *,
    rollouts_per_prompt: int,
    max_rollouts: int,
    pad_id: int,
) -> tuple[BatchedDataDict, int]:
    """A scored rollout of as many rows as ``draw`` gives, and how many samples were drawn for it.

    ``draw``: the next scored rollout, responses to a prompt adjacent, ``rollouts_per_prompt`` of
    them. At most ``max_rollouts`` are drawn; what is missing then is filled with groups that have
    no signal, the earliest first, which count but teach nothing. Groups keep the order in which
    they were drawn; ``pad_id`` fills shorter rows.
    """
    kept: list[BatchedDataDict] = []
    spare: list[BatchedDataDict] = []
    wanted = drawn = rows = 0
    for _ in range(max_rollouts):
        batch = draw()
        wanted, drawn = wanted or batch.size, drawn + batch.size
        groups = torch.arange(batch.size) // rollouts_per_prompt
        signal = has_signal(batch["rewards"], groups, batch["sample_mask"])
        kept.append(batch.select_indices(signal.nonzero().flatten()))
        spare.append(batch.select_indices((~signal).nonzero().flatten()))
        rows += kept[-1].size
        if rows >= wanted:
            break
    joined: BatchedDataDict = BatchedDataDict.from_batches(
        [*kept, *spare], pad_value_dict={"input_ids": pad_id}
    )
    return joined.slice(0, wanted), drawn
