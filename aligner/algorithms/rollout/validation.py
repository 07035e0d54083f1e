"""Validation of a policy on held-out prompts, during a run and in an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from aligner.algorithms.rollout.prefetch import Rollouts
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
from aligner.observe.metrics import PhaseTimers
from aligner.observe.samples import Sample
from aligner.rewards.interface import RewardInterface


@dataclass(frozen=True)
class Asking:
    """Settings by which prompts are put to an engine.

    ``sampling_options``: None: the engine's own. ``rows``: responses of one call.
    ``seed``: of the random numbers, which depend only on it, the prompt's place and the sample.
    ``source``: of rollouts.
    """

    generation: GenerationInterface
    pad_id: int
    seed: int
    rows: int
    samples_per_prompt: int = 1
    sampling_options: SamplingOptions | None = None
    source: RolloutSource = field(default_factory=SingleTurn)


def ask(asking: Asking, prompts: PromptDataset, limit: int | None = None) -> BatchedDataDict:
    """Responses to the first ``limit`` prompts (None: all), as one rollout batch.

    Responses to a prompt are adjacent. Row i is sample i.
    """
    per_prompt = asking.samples_per_prompt
    size = min(len(prompts), limit or len(prompts))
    batches = []
    for indices in sequential_batches(size, max(1, asking.rows // per_prompt)):
        asked = collate_prompts([prompts[i] for i in indices], asking.pad_id)
        data = prompts_batch(asked, indices[0] * per_prompt, per_prompt)
        found = asking.source.collect(
            asking.generation,
            data,
            seed=asking.seed,
            per_prompt=per_prompt,
            sampling_options=asking.sampling_options,
        )
        batches.append(found)
    return BatchedDataDict.from_batches(batches, pad_value_dict={"input_ids": asking.pad_id})


@dataclass(frozen=True)
class Evaluation:
    """Results of the responses to one set of prompts.

    ``metrics``: of the rollout, without a prefix. ``estimates``: mean@n, pass@k and maj@k; of
    single responses only ``accuracy`` and ``rewards``. ``batch``: the scored rollout, with
    ``answers`` where there are several responses to a prompt. A conversation that was not scored
    earns 0 and is not right.
    """

    metrics: dict[str, float]
    estimates: dict[str, Estimate]
    batch: BatchedDataDict
    samples_per_prompt: int

    def shown(self, step: int, count: int) -> list[Sample]:
        """The first response to each of the first ``count`` prompts."""
        first = list(range(0, self.batch.size, self.samples_per_prompt))[:count]
        return samples_of(self.batch.select_indices(first), step, "val", count)


@dataclass(frozen=True)
class Judge:
    """Scorer of responses.

    ``final_answer``: of a response's text, by which a majority is found.
    """

    reward: RewardInterface
    final_answer: Callable[[str], str | None]

    @classmethod
    def of(cls, reward: RewardInterface, final_answer: str, key: str) -> "Judge":
        """``final_answer``: the function's name, which the configuration key ``key`` gave."""
        return cls(reward, load_function(final_answer, key=key))

    def evaluate(self, batch: BatchedDataDict, samples_per_prompt: int) -> Evaluation:
        """Score a rollout that `ask` returned; every conversation that was begun counts."""
        batch["sample_mask"] = torch.ones(batch.size)
        metrics = score(self.reward, batch)
        rewards = _rows(batch["rewards"].tolist(), samples_per_prompt)
        right = _rows(batch["is_right"].tolist(), samples_per_prompt)
        estimates = {
            name: mean_over_prompts([sum(row) / len(row) for row in values])
            for name, values in (("accuracy", right), ("rewards", rewards))
        }
        if samples_per_prompt > 1:
            batch["answers"] = [self.final_answer(text) for text in _last_messages(batch)]
            answers = _rows(batch["answers"], samples_per_prompt)
            estimates |= answer_estimates(right, answers)
        return Evaluation(metrics, estimates, batch, samples_per_prompt)


def validate_on_prompts(
    config: SamplingRunConfig,
    rollouts: Rollouts,
    generation: GenerationInterface,
    reward: RewardInterface,
    held_out: Mapping[str, PromptDataset],
    step: int,
    timers: PhaseTimers,
) -> StepResult:
    """Sample responses to the prompts of every set and score them; nothing without prompts.

    Every validation of a run draws with the same random numbers, those of a set whatever other sets
    there are. ``rollouts``: those of training; one that is in flight is drained first, for it draws
    with older weights. ``held_out``: sets by the prefix of their metrics.
    """
    validation = config.validation
    if not held_out:
        return StepResult({})
    judge = Judge.of(reward, validation.final_answer, "validation.final_answer")
    asking = Asking(
        generation,
        rollouts.pad_id,
        config.seed + VALIDATION_SEED_OFFSET,
        config.model.rollout.num_rollout_samples,
        validation.samples_per_prompt,
        validation.sampling_options(config.model.rollout),
        rollouts.source,
    )
    metrics: dict[str, float] = {}
    samples: list[Sample] = []
    with timers("validate"):
        rollouts.drain()
        for prefix, prompts in held_out.items():
            batch = ask(asking, prompts, config.loop.limit_val_prompts)
            found = judge.evaluate(batch, asking.samples_per_prompt)
            metrics |= prefixed(prefix, found.metrics | _at_k(found.estimates))
            samples += found.shown(step, config.exp_manager.samples_per_step)
    return StepResult(metrics, samples)


def _at_k(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """mean@n, pass@k and maj@k with their standard errors, as metrics."""
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        if "_at_" in name:
            metrics[name] = estimate.value
            if estimate.error is not None:
                metrics[f"{name}_stderr"] = estimate.error
    return metrics


def _last_messages(batch: BatchedDataDict) -> list[str]:
    """Responses; of conversations the policy's last message, without roles and rewards."""
    if "turns" not in batch:
        return batch["responses"]
    return [turns[-1]["content"] for turns in batch["turns"]]


def _rows(values: list, samples_per_prompt: int) -> list[list]:
    """One list for each prompt."""
    return [
        values[start : start + samples_per_prompt]
        for start in range(0, len(values), samples_per_prompt)
    ]
