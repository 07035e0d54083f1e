"""Rollouts without groups that teach nothing (DAPO's dynamic sampling; Yu et al., 2025).

Where all responses to a prompt earn the same, their advantages are 0. Such groups are replaced by
those of further prompts, so that every update learns from as many samples.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.losses.group_advantages import has_reward_variance


def fill_with_varied_groups(
    sample: Callable[[int], BatchedDataDict],
    *,
    prompts: int,
    rollouts_per_prompt: int,
    max_rollouts: int,
    prompts_left: Callable[[], int],
    pad_id: int,
) -> tuple[BatchedDataDict, int]:
    """A scored rollout of ``prompts`` groups, and how many samples were sampled for it.

    ``sample``: the next scored rollout of this many prompts, with ``sample_mask`` and
    ``shaped_rewards``; responses to a prompt adjacent, ``rollouts_per_prompt`` of them. After the
    first rollout only what is missing is sampled, so no group with signal is thrown away and all
    come from the same weights (verl and NeMo-RL sample whole rollouts and drop the surplus).

    Sampling ends when ``max_rollouts`` times ``prompts`` prompts were asked or ``prompts_left()``,
    how many the run may yet sample, is 0. What is missing then is filled with groups that have no
    signal, the earliest first, which count but teach nothing. Groups keep the order in which they
    were sampled; ``pad_id`` fills shorter rows.
    """
    kept: list[BatchedDataDict] = []
    spare: list[BatchedDataDict] = []
    sampled = 0
    missing = asked = prompts
    allowed = max_rollouts * prompts
    while asked:
        batch = sample(asked)
        allowed -= asked
        sampled += batch.size
        signal = teaches(batch, rollouts_per_prompt)
        kept.append(batch.select_indices(signal.nonzero().flatten()))
        spare.append(batch.select_indices((~signal).nonzero().flatten()))
        missing -= int(signal.sum()) // rollouts_per_prompt
        asked = min(missing, allowed, prompts_left())
    joined: BatchedDataDict = BatchedDataDict.from_batches(
        [*kept, *spare], pad_value_dict={"input_ids": pad_id}
    )
    return joined.slice(0, prompts * rollouts_per_prompt), sampled


def teaches(batch: BatchedDataDict, rollouts_per_prompt: int) -> Tensor:
    """bool [B]: the rewards of the row's group differ, and still do once they are shaped.

    DAPO compares the verifier's rewards, without what length adds to them; a bound on the reward
    (``trainer.ppo.reward.clip``) may take the difference away. The rows of a group go together: one
    that does not count (``sample_mask`` 0) is not compared, and is kept with the others.
    """
    groups = torch.arange(batch.size) // rollouts_per_prompt
    counts = batch["sample_mask"]
    varied = has_reward_variance(batch["rewards"], groups, counts)
    varied &= has_reward_variance(batch["shaped_rewards"], groups, counts)
    return varied.view(-1, rollouts_per_prompt).any(1).repeat_interleave(rollouts_per_prompt)
