"""Validation of a policy on held-out prompts, during a run and in an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from aligner.algorithms.rollout.rollout import (
    VALIDATION_SEED_OFFSET,
    RolloutSource,
    SingleResponses,
    prefixed,
    prompts_batch,
    samples_of,
    score,
)
from aligner.algorithms.run.loop import StepResult
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.data.batches import collate_prompts, sequential_batches
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.importing import load_function
from aligner.models.interfaces import GenerationInterface
from aligner.observe.estimates import Estimate, answer_estimates, mean_over_prompts
from aligner.observe.metrics import Sample
from aligner.rewards.interface import RewardInterface


@dataclass(frozen=True)
class PromptSampling:
    """Settings for sampling responses to prompts."""

    generation: GenerationInterface
    pad_id: int
    seed: int
    rows: int  # maximum number of responses per call of the engine
    samples_per_prompt: int = 1
    sampling_options: SamplingOptions | None = None
    source: RolloutSource = field(default_factory=SingleResponses)


def sample_responses(
    sampling: PromptSampling, prompts: PromptDataset, limit: int | None = None
) -> BatchedDataDict:
    """Sample responses to the first ``limit`` prompts. Responses to a prompt are adjacent."""
    per_prompt = sampling.samples_per_prompt
    size = min(len(prompts), limit or len(prompts))
    batches = []
    for indices in sequential_batches(size, max(1, sampling.rows // per_prompt)):
        rows = collate_prompts([prompts[i] for i in indices], sampling.pad_id)
        data = prompts_batch(rows, indices[0] * per_prompt, per_prompt)
        batch = sampling.source.collect(
            sampling.generation,
            data,
            seed=sampling.seed,
            per_prompt=per_prompt,
            sampling_options=sampling.sampling_options,
        )
        batches.append(batch)
    return BatchedDataDict.from_batches(batches, pad_value_dict={"input_ids": sampling.pad_id})


@dataclass(frozen=True)
class Evaluation:
    """Scores of sampled responses to one set of prompts.

    ``estimates``: ``accuracy`` and ``rewards``. If there are several responses to a prompt, also
    mean@n, pass@k and maj@k. ``batch``: the rollout batch with rewards, and with several responses
    also the final ``answers``. A conversation without a reward has reward 0 and is not right.
    """

    metrics: dict[str, float]
    estimates: dict[str, Estimate]
    batch: BatchedDataDict
    samples_per_prompt: int

    def at_k(self) -> dict[str, float]:
        """Return mean@n, pass@k and maj@k, and their standard errors, as metrics."""
        metrics: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            if "_at_" in name:
                metrics[name] = estimate.value
                if estimate.error is not None:
                    metrics[f"{name}_stderr"] = estimate.error
        return metrics

    def shown(self, step: int, count: int) -> list[Sample]:
        """Return the first response to each of the first ``count`` prompts, as text to display."""
        first = list(range(0, self.batch.size, self.samples_per_prompt))[:count]
        return samples_of(self.batch.select_indices(first), step, "val", count)


def evaluate_responses(
    batch: BatchedDataDict,
    samples_per_prompt: int,
    reward: RewardInterface,
    final_answer: Callable[[str], str | None],
) -> Evaluation:
    """Score a rollout batch. ``final_answer`` extracts the answer of a response, for maj@k."""
    batch["sample_mask"] = torch.ones(batch.size)
    metrics = score(reward, batch)
    rewards = _by_prompt(batch["rewards"].tolist(), samples_per_prompt)
    right = _by_prompt(batch["is_right"].tolist(), samples_per_prompt)
    estimates = {
        name: mean_over_prompts([sum(row) / len(row) for row in values])
        for name, values in (("accuracy", right), ("rewards", rewards))
    }
    if samples_per_prompt > 1:
        # The last message contains the answer of a conversation.
        texts = batch["responses"]
        if "turns" in batch:
            texts = [turns[-1]["content"] for turns in batch["turns"]]
        batch["answers"] = [final_answer(text) for text in texts]
        estimates |= answer_estimates(right, _by_prompt(batch["answers"], samples_per_prompt))
    return Evaluation(metrics, estimates, batch, samples_per_prompt)


def validate_on_prompts(
    config: SamplingRunConfig,
    source: RolloutSource,
    generation: GenerationInterface,
    reward: RewardInterface,
    held_out: Mapping[str, PromptDataset],
    step: int,
    pad_id: int,
) -> StepResult:
    """Sample and score responses to each set in ``held_out``. Its keys are prefixes of metrics."""
    validation = config.validation
    final_answer = load_function(validation.final_answer, key="validation.final_answer")
    rollout, seed = config.model.rollout, config.seed + VALIDATION_SEED_OFFSET
    rows, count = rollout.num_rollout_samples, validation.samples_per_prompt
    options = validation.sampling_options(rollout)
    sampling = PromptSampling(generation, pad_id, seed, rows, count, options, source)
    metrics: dict[str, float] = {}
    samples: list[Sample] = []
    for prefix, prompts in held_out.items():
        batch = sample_responses(sampling, prompts, config.loop.limit_val_prompts)
        evaluation = evaluate_responses(batch, count, reward, final_answer)
        metrics |= prefixed(prefix, evaluation.metrics | evaluation.at_k())
        samples += evaluation.shown(step, config.exp_manager.samples_per_step)
    return StepResult(metrics, samples)


def _by_prompt(values: list, count: int) -> list[list]:
    return [values[start : start + count] for start in range(0, len(values), count)]
