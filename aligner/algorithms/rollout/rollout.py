"""Collection of rollouts: sample responses to prompts, and score them.

main thread ── begin ──► collecting thread (`ConversationsAhead`) ── rows ──► engine
     ▲                          │         ▲                                     │
     └──── rollout batch ───────┘         └────────────── tokens ───────────────┘
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
from torch import Tensor

from aligner.config import SamplingOptions
from aligner.data.batches import PromptBatch
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.observe.diagnostics import rollout_metrics, statistics
from aligner.observe.metrics import Sample
from aligner.rewards.interface import RewardInterface

# Added to the run's seed for validation, so that validation never shares random numbers with
# training and every validation of a run uses the same random numbers.
VALIDATION_SEED_OFFSET = 1_000_003


def prompts_batch(
    prompts: PromptBatch, first_sample_id: int, rollouts_per_prompt: int = 1
) -> BatchedDataDict:
    """Return the input of a sampling engine: ``rollouts_per_prompt`` adjacent rows per prompt.

    Columns: ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B], ``sample_ids`` int64 [B]
    (``first_sample_id + i`` for row i), and the lists ``prompts``, ``ground_truths`` and
    ``columns`` (one dictionary per row).
    """
    columns = [
        {name: values[row] for name, values in prompts.columns.items()}
        for row in range(len(prompts))
    ]
    data: BatchedDataDict = BatchedDataDict(
        {
            "input_ids": prompts.input_ids,
            "input_lengths": prompts.input_lengths,
            "prompts": prompts.texts,
            "ground_truths": prompts.ground_truths,
            "columns": columns,
        }
    ).repeat_interleave(rollouts_per_prompt)
    data["sample_ids"] = torch.arange(data.size) + first_sample_id
    return data


class RolloutSource(ABC):
    """Interface of classes that sample rollouts: single responses or conversations."""

    @abstractmethod
    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """Sample responses. Return a rollout batch (`aligner.types`) on the host, without rewards.

        ``data``: a `prompts_batch`, whose lists are copied to the result. ``per_prompt``: number of
        adjacent rows with the same prompt. ``sampling_options``: replaces the engine's length and
        sampling settings.
        """

    @abstractmethod
    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """Begin `collect` in the background. `rollout_of` converts an engine output to a batch."""


class SingleResponses(RolloutSource):
    """Source of rollouts in which each row is one response to a prompt."""

    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """See `RolloutSource`."""
        generation.prepare_for_generation()
        output = generation.generate(data, seed=seed, sampling_options=sampling_options).to("cpu")
        generation.finish_generation()
        return rollout_of(data, output)

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """See `RolloutSource`."""
        return generation.generate_in_background(data, seed=seed)


class ConversationsAhead:
    """Conversations that a thread collects while the policy is trained (`PendingGeneration`).

    Until `result` or `abandon` returns, only the thread may use engine and environments. One
    process drives engines that sample in the background, so the thread calls no collective.
    """

    def __init__(self, collect: Callable[[Callable[[], bool]], BatchedDataDict]) -> None:
        """Call ``collect`` in a thread. Its argument is a function that returns True to stop it."""
        self._abandoned = Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._future = thread.submit(collect, self._abandoned.is_set)
        thread.shutdown(wait=False)

    def result(self) -> BatchedDataDict:
        """Wait for the rollout batch. Raises the exception of ``collect`` if it failed."""
        return self._future.result()

    def abandon(self) -> None:
        """Stop the thread after the engine's current batch, and ignore errors."""
        self._abandoned.set()
        self._future.exception()


def rollout_of(data: BatchedDataDict, output: BatchedDataDict) -> BatchedDataDict:
    """Return the rollout batch of a `prompts_batch` and an engine's `GenerationOutputSpec`."""
    prompt_lengths, lengths = data["input_lengths"], output["unpadded_sequence_lengths"]
    kept_ids = {"kept_ids": output["kept_ids"]} if "kept_ids" in output else {}
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": lengths,
            "prompt_lengths": prompt_lengths,
            "is_end": output["is_end"],
            "token_mask": response_mask(prompt_lengths, lengths, output["output_ids"].shape[1]),
            "sample_mask": torch.ones(data.size),
            "generation_logprobs": output["logprobs"],
            **kept_ids,
            **{name: data[name] for name in ("sample_ids", "prompts", "ground_truths", "columns")},
        }
    )


def response_mask(prompt_lengths: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return float32 [B, width], 1 for generated tokens: prompt_length <= t < length."""
    position = torch.arange(width)
    return ((position >= prompt_lengths[:, None]) & (position < lengths[:, None])).float()


def score(reward: RewardInterface, batch: BatchedDataDict) -> dict[str, float]:
    """Add ``rewards``, ``responses`` and ``is_right`` to a rollout batch, and return its metrics.

    ``is_right``, float32 [B], is the reward's part ``accuracy``. Without this part, it is 1 for
    rewards of at least 1, else 0. Means of rewards and parts exclude conversations with
    ``sample_mask``, float32 [B], of 0. ``accuracy_of_answered`` averages ``is_right`` over
    conversations with a reward.
    """
    scored = reward.get_rewards(batch)
    batch["rewards"], batch["responses"] = scored.rewards, scored.responses
    right, values = (scored.rewards >= 1).float(), dict(scored.parts)
    batch["is_right"] = torch.tensor(values["accuracy"]) if "accuracy" in values else right
    metrics = rollout_metrics(batch)
    # Exclude masked conversations from all means.
    if "is_scored" in batch:
        answered = statistics(batch["is_right"], batch["is_scored"])["mean"]
        metrics["accuracy_of_answered"] = answered.item()
        rows = batch["sample_mask"].nonzero().flatten().tolist()
        right = right[rows]
        values = {name: [column[row] for row in rows] for name, column in values.items()}
    parts = {name: sum(column) / max(1, len(column)) for name, column in values.items()}
    metrics["accuracy"] = parts.pop("accuracy", right.mean().item())
    metrics["reward_timeouts"] = scored.timeouts
    parts = {f"reward_parts/{name}": value for name, value in parts.items()}
    return {**metrics, **parts, **scored.metrics}


def samples_of(batch: BatchedDataDict, step: int, split: Any, count: int) -> list[Sample]:
    """Return the first ``count`` rows of a rollout batch with rewards, as text to display."""
    truths = batch["ground_truths"]
    return [
        Sample(
            step=step,
            split=split,
            prompt=batch["prompts"][row],
            response=batch["responses"][row],
            reward=batch["rewards"][row].item(),
            prompt_length=int(batch["prompt_lengths"][row]),
            response_length=int(batch["token_mask"][row].sum()),
            is_end=bool(batch["is_end"][row]),
            ground_truth=None if truths[row] is None else str(truths[row]),
            sample_id=int(batch["sample_ids"][row]),
            turns=batch["turns"][row] if "turns" in batch else None,
        )
        for row in range(min(count, batch.size))
    ]


def prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return ``metrics`` with ``prefix/`` before every name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
