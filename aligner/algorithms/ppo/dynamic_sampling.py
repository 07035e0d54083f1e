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
    """Sample a rollout of groups with different rewards. Also return the number of samples drawn.

    A group consists of the responses to one prompt. If all responses of a group have the same
    reward, their advantages are 0, so another group replaces the group. Each repeated call of
    ``sample`` gets as many prompts as groups are missing.

    Args:
        sample: samples and scores the next n prompts. Returns a rollout batch with the columns
            ``sample_mask`` and ``shaped_rewards``. Responses to a prompt must be adjacent.
        prompts: number of groups in the result.
        rollouts_per_prompt: number of responses in a group.
        max_rollouts: sampling ends after ``max_rollouts * prompts`` prompts. Groups of equal
            rewards then fill the batch, the earliest first.
        prompts_left: returns how many prompts the run may still sample.
        pad_id: token id that pads shorter rows.
        credit: ``turn`` compares the rewards of turns instead of responses.
    """
    varied: list[BatchedDataDict] = []  # groups with different rewards
    uniform: list[BatchedDataDict] = []
    sampled, missing, count, allowed = 0, prompts, prompts, max_rollouts * prompts
    while count:
        batch = sample(count)
        allowed -= count
        sampled += batch.size
        differs = rewards_differ(batch, rollouts_per_prompt, credit)
        varied.append(batch.select_indices(differs.nonzero().flatten()))
        uniform.append(batch.select_indices((~differs).nonzero().flatten()))
        missing -= int(differs.sum()) // rollouts_per_prompt
        count = min(missing, allowed, prompts_left())
    # Groups of equal rewards fill up the batch.
    pad_values = {"input_ids": pad_id}
    batch = BatchedDataDict.from_batches([*varied, *uniform], pad_value_dict=pad_values)
    return batch.slice(0, prompts * rollouts_per_prompt), sampled


def rewards_differ(
    batch: BatchedDataDict,
    rollouts_per_prompt: int,
    credit: Literal["trajectory", "turn"] = "trajectory",
) -> Tensor:
    """Return bool [B], True if the rewards of the row's group differ before and after shaping.

    Rewards must differ before shaping, because DAPO compares rewards without the length penalty,
    and after shaping, because clipping (``trainer.ppo.reward.clip``) may remove the difference.
    Samples with ``sample_mask`` 0 are not compared. ``credit="turn"`` compares rewards of turns.
    """
    groups = torch.arange(batch.size) // rollouts_per_prompt
    turns = batch.get("turn_ids") if credit == "turn" else None
    name = "rewards" if turns is None else "turn_rewards"
    varied = has_reward_variance(batch[name], groups, batch["sample_mask"], turns)
    varied &= has_reward_variance(batch[f"shaped_{name}"], groups, batch["sample_mask"], turns)
    return varied.view(-1, rollouts_per_prompt).any(1).repeat_interleave(rollouts_per_prompt)
