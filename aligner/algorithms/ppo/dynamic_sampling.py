"""Dynamic sampling of DAPO (Yu et al., 2025): groups of equal rewards are replaced."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.groups import has_reward_variance


def fill_with_varied_groups(
    sample: Callable[[int], BatchedDataDict],
    *,
    prompts: int,
    rollouts_per_prompt: int,
    max_rollouts: int,
    prompts_left: Callable[[], int],
    pad_id: int,
    credit: Literal["trajectory", "turn"] = "trajectory",
) -> tuple[BatchedDataDict, int]:
    """Return a scored rollout batch of ``prompts`` groups and the number of samples drawn for it.

    Dynamic sampling of DAPO (Yu et al., 2025): if all responses to a prompt earn the same reward,
    their advantages are 0, so other groups replace them. Later rollouts sample only as many groups
    as are missing. No group with signal is dropped.

    Args:
        sample: returns the next scored rollout of n prompts, with the columns ``sample_mask`` and
            ``shaped_rewards``. The ``rollouts_per_prompt`` responses to a prompt are adjacent.
        prompts: number of groups.
        rollouts_per_prompt: number of responses in a group.
        max_rollouts: sampling ends after ``max_rollouts * prompts`` prompts. Groups without signal
            then fill the batch, the earliest first.
        prompts_left: returns how many prompts the run may still sample.
        pad_id: id that pads shorter rows.
        credit: see `teaches`.
    """
    with_signal: list[BatchedDataDict] = []
    without_signal: list[BatchedDataDict] = []
    sampled, missing, count = 0, prompts, prompts
    allowed = max_rollouts * prompts
    while count:
        batch = sample(count)
        allowed -= count
        sampled += batch.size
        has_signal = teaches(batch, rollouts_per_prompt, credit)
        with_signal.append(batch.select_indices(has_signal.nonzero().flatten()))
        without_signal.append(batch.select_indices((~has_signal).nonzero().flatten()))
        missing -= int(has_signal.sum()) // rollouts_per_prompt
        count = min(missing, allowed, prompts_left())
    # Groups without signal fill up the batch.
    batch = BatchedDataDict.from_batches(
        [*with_signal, *without_signal], pad_value_dict={"input_ids": pad_id}
    )
    return batch.slice(0, prompts * rollouts_per_prompt), sampled


def teaches(
    batch: BatchedDataDict,
    rollouts_per_prompt: int,
    credit: Literal["trajectory", "turn"] = "trajectory",
) -> Tensor:
    """Return bool [B], true if the rewards of the row's group differ before and after shaping.

    DAPO compares the verifier's rewards, without the length penalty. A limit of rewards
    (``trainer.ppo.reward.clip``) may remove the difference. A sample that does not count
    (``sample_mask`` 0) is not compared. ``credit="turn"`` compares rewards of turns, if any.
    """
    groups = torch.arange(batch.size) // rollouts_per_prompt
    counts = batch["sample_mask"]
    turns = batch.get("turn_ids") if credit == "turn" else None
    name = "rewards" if turns is None else "turn_rewards"
    varied = has_reward_variance(batch[name], groups, counts, turns)
    varied &= has_reward_variance(batch[f"shaped_{name}"], groups, counts, turns)
    return varied.view(-1, rollouts_per_prompt).any(1).repeat_interleave(rollouts_per_prompt)
