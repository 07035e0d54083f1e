"""Validation of a policy on held-out prompts, during a run and in an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from aligner.algorithms.rollout.rollout import (
    VALIDATION_SEED_OFFSET,
    RolloutSource,
    SingleTurn,
    prefixed,
    prompts_batch,
    samples_of,
    score,
)
from aligner.algorithms.run.loop import StepResult
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.data.dataset import sequential_batches
from aligner.data.prompts import PromptDataset, collate_prompts
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.importing import load_function
from aligner.models.interfaces import GenerationInterface
from aligner.observe.estimates import Estimate, answer_estimates, mean_over_prompts
from aligner.observe.samples import Sample
from aligner.rewards.interface import RewardInterface


@dataclass(frozen=True)
class PromptSampling:
    """Settings with which an engine samples responses to prompts.

    ``rows`` is the number of responses of one call. Random numbers depend only on ``seed``, the
    prompt's index and the sample's index. ``sampling_options`` replaces the policy's
    lengths and sampling parameters.
    """

    generation: GenerationInterface
    pad_id: int
    seed: int
    rows: int
    samples_per_prompt: int = 1
    sampling_options: SamplingOptions | None = None
    source: RolloutSource = field(default_factory=SingleTurn)


def sample_responses(
    sampling: PromptSampling, prompts: PromptDataset, limit: int | None = None
) -> BatchedDataDict:
    """Return responses to the first ``limit`` prompts (None: all) as one rollout batch.

    Responses to a prompt are adjacent. Row i is sample i.
    """
    per_prompt = sampling.samples_per_prompt
    size = min(len(prompts), limit or len(prompts))
    batches = []
    for indices in sequential_batches(size, max(1, sampling.rows // per_prompt)):
        rows = collate_prompts([prompts[i] for i in indices], sampling.pad_id)
        batch = sampling.source.collect(
            sampling.generation,
            prompts_batch(rows, indices[0] * per_prompt, per_prompt),
            seed=sampling.seed,
            per_prompt=per_prompt,
            sampling_options=sampling.sampling_options,
        )
        batches.append(batch)
    return BatchedDataDict.from_batches(batches, pad_value_dict={"input_ids": sampling.pad_id})


@dataclass(frozen=True)
class Evaluation:
    """Results of the responses to one set of prompts.

    ``metrics`` are metrics of the rollout, without a prefix. ``estimates`` are ``accuracy`` and
    ``rewards``, and with several responses to a prompt also mean@n, pass@k and maj@k. ``batch`` is
    the scored rollout batch, with ``answers`` if there are several responses to a prompt. A
    conversation that was not scored earns 0 and is not right.
    """

    metrics: dict[str, float]
    estimates: dict[str, Estimate]
    batch: BatchedDataDict
    samples_per_prompt: int

    def shown(self, step: int, count: int) -> list[Sample]:
        """Return the first response to each of the first ``count`` prompts."""
        first = list(range(0, self.batch.size, self.samples_per_prompt))[:count]
        return samples_of(self.batch.select_indices(first), step, "val", count)


@dataclass(frozen=True)
class Judge:
    """Scorer of responses. ``final_answer`` extracts the answer that majority votes compare."""

    reward: RewardInterface
    final_answer: Callable[[str], str | None]

    @classmethod
    def of(cls, reward: RewardInterface, final_answer: str, key: str) -> "Judge":
        """Load ``final_answer``, the function that the configuration key ``key`` names."""
        return cls(reward, load_function(final_answer, key=key))

    def evaluate(self, batch: BatchedDataDict, samples_per_prompt: int) -> Evaluation:
        """Score a batch of `sample_responses`, in which every started conversation counts."""
        batch["sample_mask"] = torch.ones(batch.size)
        metrics = score(self.reward, batch)
        rewards = _rows(batch["rewards"].tolist(), samples_per_prompt)
        right = _rows(batch["is_right"].tolist(), samples_per_prompt)
        estimates = {
            name: mean_over_prompts([sum(row) / len(row) for row in values])
            for name, values in (("accuracy", right), ("rewards", rewards))
        }
        if samples_per_prompt > 1:
            # The last message contains the answer of a conversation.
            texts = batch["responses"]
            if "turns" in batch:
                texts = [turns[-1]["content"] for turns in batch["turns"]]
            batch["answers"] = [self.final_answer(text) for text in texts]
            answers = _rows(batch["answers"], samples_per_prompt)
            estimates |= answer_estimates(right, answers)
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
    """Sample responses to the prompts of every set and score them.

    Every validation of a run uses the same random numbers, and the random numbers of a set do not
    depend on other sets. ``held_out`` maps prefixes of metrics to sets.
    """
    validation = config.validation
    judge = Judge.of(reward, validation.final_answer, "validation.final_answer")
    sampling = PromptSampling(
        generation,
        pad_id,
        config.seed + VALIDATION_SEED_OFFSET,
        config.model.rollout.num_rollout_samples,
        validation.samples_per_prompt,
        validation.sampling_options(config.model.rollout),
        source,
    )
    # Metrics of each set have its prefix.
    metrics: dict[str, float] = {}
    samples: list[Sample] = []
    for prefix, prompts in held_out.items():
        batch = sample_responses(sampling, prompts, config.loop.limit_val_prompts)
        evaluation = judge.evaluate(batch, sampling.samples_per_prompt)
        metrics |= prefixed(prefix, evaluation.metrics | _at_k(evaluation.estimates))
        samples += evaluation.shown(step, config.exp_manager.samples_per_step)
    return StepResult(metrics, samples)


def _at_k(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return mean@n, pass@k and maj@k with their standard errors as metrics."""
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        if "_at_" in name:
            metrics[name] = estimate.value
            if estimate.error is not None:
                metrics[f"{name}_stderr"] = estimate.error
    return metrics


def _rows(values: list, samples_per_prompt: int) -> list[list]:
    """Return one list for each prompt."""
    return [
        values[start : start + samples_per_prompt]
        for start in range(0, len(values), samples_per_prompt)
    ]
