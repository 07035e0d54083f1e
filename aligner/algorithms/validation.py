"""How good the policy is on prompts it does not learn from."""

from aligner.algorithms.overlap import Rollouts
from aligner.algorithms.rollout import (
    VALIDATION_SEED_OFFSET,
    generate,
    prefixed,
    prompts_batch,
    rollout_of,
    samples_of,
    score,
)
from aligner.algorithms.run_loop import Outcome
from aligner.config import SamplingRunConfig
from aligner.data.collate import collate_prompts
from aligner.data.prompts import PromptDataset
from aligner.data.sampler import sequential_batches
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import GenerationInterface
from aligner.models.reward.lm_reward import RewardInterface
from aligner.observe.timers import PhaseTimers


def validate_on_prompts(
    config: SamplingRunConfig,
    rollouts: Rollouts,
    generation: GenerationInterface,
    reward: RewardInterface,
    prompts: PromptDataset | None,
    step: int,
    timers: PhaseTimers,
) -> Outcome:
    """Sample one response to each of ``prompts`` and score it; nothing without prompts.

    Every validation of a run draws with the same random numbers. ``rollouts``: those of training;
    one that is in flight is settled first, for it draws with older weights.
    """
    if prompts is None:
        return Outcome({})
    size = min(len(prompts), config.loop.limit_val_prompts or len(prompts))
    batches = []
    with timers("validate"):
        rollouts.settle()
        for indices in sequential_batches(size, config.model.rollout.num_rollout_samples):
            asked = collate_prompts([prompts[i] for i in indices], rollouts.pad_id)
            data = prompts_batch(asked, first_sample_id=indices[0])
            seed = config.seed + VALIDATION_SEED_OFFSET
            batches.append(rollout_of(data, generate(generation, data, seed=seed)))
        everything: BatchedDataDict = BatchedDataDict.from_batches(
            batches, pad_value_dict={"input_ids": rollouts.pad_id}
        )
        metrics = prefixed("val_rollouts", score(reward, everything))
    shown = config.exp_manager.samples_per_step
    return Outcome(metrics, samples_of(everything, step, "val", shown))
