"""Collecting rollouts: prompts → responses → rewards. Shared by every algorithm that samples.

Groups that teach nothing may be replaced (DAPO's dynamic sampling; Yu et al., 2025): where all
responses to a prompt earn the same, their advantages are 0. Others take their place, so that every
update learns from as many samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from aligner.config import ImproperEndConfig, RewardShapingConfig, SamplingOptions
from aligner.data.prompts import PromptBatch
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.advantages import has_reward_variance, token_rewards
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.observe.diagnostics import rollout_metrics, statistics
from aligner.observe.samples import Sample
from aligner.rewards.interface import RewardInterface

# Validation draws with the run's seed moved by this much, so that it never shares random numbers
# with training and every validation of a run draws with the same ones.
VALIDATION_SEED_OFFSET = 1_000_003


def prompts_batch(
    prompts: PromptBatch, first_sample_id: int, rollouts_per_prompt: int = 1
) -> BatchedDataDict:
    """Batch that a sampling engine continues: one row per response, those to a prompt adjacent.

    Row i is sample ``first_sample_id + i``. Besides tensors it has the lists ``prompts``,
    ``ground_truths`` and ``columns`` (one dict per row).
    """
    data = _as_batch(prompts).repeat_interleave(rollouts_per_prompt)
    data["sample_ids"] = torch.arange(data.size) + first_sample_id
    return data


class RolloutSource(ABC):
    """A way from prompts to a rollout batch: one response each (`SingleTurn`), or conversations.

    All of them sample by `GenerationInterface.generate`, and what follows (rewards, advantages,
    updates, validation, rollouts ahead, run states) knows no difference.
    """

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
        """A rollout batch (`aligner.types`) on the host, up to ``generation_logprobs``.

        ``data``: a `prompts_batch`, whose lists are taken over; ``per_prompt`` adjacent rows are
        of one prompt. ``sampling_options``: lengths and sampling, in place of the engine's own.
        """

    @abstractmethod
    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """Begin `collect` while the policy trains; the result is the rollout batch."""


class SingleTurn(RolloutSource):
    """One response to each prompt: one turn, and its end."""

    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """See `RolloutSource.collect`."""
        del per_prompt
        others: dict[str, Any] = {}
        if sampling_options is not None:
            others["sampling_options"] = sampling_options
        generation.prepare_for_generation()
        output = generation.generate(data, seed=seed, **others).to("cpu")
        generation.finish_generation()
        return rollout_of(data, output)

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """See `RolloutSource.begin`."""
        del per_prompt
        return _ResponsesAhead(generation.generate_in_background(data, seed=seed), data)


class _ResponsesAhead:
    """Responses that an engine is sampling (`PendingGeneration`)."""

    def __init__(self, pending: PendingGeneration, data: BatchedDataDict) -> None:
        self._pending, self._data = pending, data

    def result(self) -> BatchedDataDict:
        """Wait for them, as a rollout batch."""
        return rollout_of(self._data, self._pending.result().to("cpu"))

    def abandon(self) -> None:
        """End and forget them."""
        self._pending.abandon()


def rollout_of(data: BatchedDataDict, output: BatchedDataDict) -> BatchedDataDict:
    """A rollout batch (`aligner.types`) with everything up to ``generation_logprobs``.

    ``data``: a `prompts_batch`, whose lists are taken over; ``output``: its responses.
    """
    prompt_lengths, lengths = data["input_lengths"], output["unpadded_sequence_lengths"]
    kept = {"kept_ids": output["kept_ids"]} if "kept_ids" in output else {}
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": lengths,
            "prompt_lengths": prompt_lengths,
            "sample_ids": data["sample_ids"],
            "is_end": output["is_end"],
            "token_mask": response_mask(prompt_lengths, lengths, output["output_ids"].shape[1]),
            "sample_mask": torch.ones(data.size),
            "generation_logprobs": output["logprobs"],
            **kept,
            "prompts": data["prompts"],
            "ground_truths": data["ground_truths"],
            "columns": data["columns"],
        }
    )


def response_mask(prompt_lengths: Tensor, lengths: Tensor, width: int) -> Tensor:
    """float32 [B, width], 1 where a token was generated: prompt_length <= t < length."""
    position = torch.arange(width)
    inside = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
    return inside.float()


def score(reward: RewardInterface, batch: BatchedDataDict) -> dict[str, float]:
    """Add ``rewards``, ``responses`` and ``is_right`` to a rollout; return its metrics.

    ``is_right``: float32 [B], the verifier's verdict; where it has none, a reward of at
    least 1. The names of the metrics have no prefix. Conversations that do not count
    (``sample_mask`` float32 [B]) are left out of means of rewards; ``accuracy_of_answered`` is of
    those that were scored (``is_scored`` float32 [B]).
    """
    scored = reward.get_rewards(batch)
    batch["rewards"], batch["responses"] = scored.rewards, scored.responses
    said = scored.parts.get("accuracy")
    batch["is_right"] = (scored.rewards >= 1).float() if said is None else torch.tensor(said)
    metrics = rollout_metrics(batch)
    right, values = (scored.rewards >= 1).float(), dict(scored.parts)
    if "is_scored" in batch:
        answered = statistics(batch["is_right"], batch["is_scored"])["mean"]
        metrics["accuracy_of_answered"] = answered.item()
        rows = batch["sample_mask"].nonzero().flatten().tolist()
        right, values = (
            right[rows],
            {name: [each[row] for row in rows] for name, each in values.items()},
        )
    parts = {name: sum(each) / max(1, len(each)) for name, each in values.items()}
    metrics["accuracy"] = parts.pop("accuracy", right.mean().item())
    metrics["reward_timeouts"] = scored.timeouts
    parts = {f"reward_parts/{name}": value for name, value in parts.items()}
    return {**metrics, **parts, **scored.metrics}


def shape_rewards(
    rewards: Tensor, is_end: Tensor, shaping: RewardShapingConfig, improper: ImproperEndConfig
) -> tuple[Tensor, Tensor]:
    """Rewards as the algorithm uses them and which samples count.

    ``R <- clamp(scale * R + shift, ±clip)``, then the penalty for responses that did not end by
    themselves. ``rewards`` float32 [B], ``is_end`` bool [B]. Returns float32 [B] and a float32
    sample mask [B], 0 where such a sample is to be left out.
    """
    shaped = shaping.scale * rewards + shaping.shift
    if shaping.clip is not None:
        shaped = shaped.clamp(-shaping.clip, shaping.clip)
    if improper.mode == "penalize":
        shaped = torch.where(is_end, shaped, shaped - improper.penalty)
    counts = is_end.float() if improper.mode == "mask" else torch.ones_like(rewards)
    return shaped, counts


def shape_turn_rewards(
    batch: BatchedDataDict, shaping: RewardShapingConfig, improper: ImproperEndConfig
) -> tuple[Tensor, Tensor]:
    """`shape_rewards` of conversations: rewards of turns, and which samples count.

    ``R <- clamp(scale * R, ±clip)`` of each turn; the penalty is of the last. Reads
    ``turn_rewards`` float32 [B, S], ``token_mask`` [B, S], ``is_end`` bool [B] and ``sample_mask``
    float32 [B], without which those count that were scored (``is_scored``) or that did not end
    properly. Returns float32 [B, S] and a sample mask [B].
    """
    shaped, ended = shaping.scale * batch["turn_rewards"], batch["is_end"].float()
    if shaping.clip is not None:
        shaped = shaped.clamp(-shaping.clip, shaping.clip)
    if improper.mode == "penalize":
        charged, turns = improper.penalty * (1 - ended), batch.get("turn_ids")
        penalties = token_rewards(charged, None, batch["token_mask"], 0.0, turn_ids=turns)
        shaped = shaped - penalties
    counts = batch.get("sample_mask", torch.maximum(batch["is_scored"], 1 - ended))
    return shaped, counts * ended if improper.mode == "mask" else counts


def samples_of(batch: BatchedDataDict, step: int, split: Any, count: int) -> list[Sample]:
    """The first ``count`` rows of a scored rollout, to be shown."""
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
            ground_truth=_shown(batch["ground_truths"][row]),
            sample_id=int(batch["sample_ids"][row]),
            turns=batch["turns"][row] if "turns" in batch else None,
        )
        for row in range(min(count, batch.size))
    ]


def prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` with ``prefix/`` before every name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _as_batch(prompts: PromptBatch) -> BatchedDataDict:
    rows = range(len(prompts))
    return BatchedDataDict(
        {
            "input_ids": prompts.input_ids,
            "input_lengths": prompts.input_lengths,
            "prompts": prompts.texts,
            "ground_truths": prompts.ground_truths,
            "columns": [
                {name: values[row] for name, values in prompts.columns.items()} for row in rows
            ],
        }
    )


def _shown(ground_truth: Any) -> str | None:
    return None if ground_truth is None else str(ground_truth)


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
    """A scored rollout of ``prompts`` groups, and how many samples were sampled for it.

    ``sample``: the next scored rollout of this many prompts, with ``sample_mask`` and
    ``shaped_rewards``; responses to a prompt adjacent, ``rollouts_per_prompt`` of them. After the
    first rollout only what is missing is sampled, so no group with signal is thrown away and all
    come from the same weights (verl and NeMo-RL sample whole rollouts and drop the surplus).

    Sampling ends when ``max_rollouts`` times ``prompts`` prompts were asked or ``prompts_left()``,
    how many the run may yet sample, is 0. What is missing then is filled with groups that have no
    signal, the earliest first, which count but teach nothing. Groups keep the order in which they
    were sampled; ``pad_id`` fills shorter rows. ``credit``: that of `teaches`.
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
        signal = teaches(batch, rollouts_per_prompt, credit)
        kept.append(batch.select_indices(signal.nonzero().flatten()))
        spare.append(batch.select_indices((~signal).nonzero().flatten()))
        missing -= int(signal.sum()) // rollouts_per_prompt
        asked = min(missing, allowed, prompts_left())
    joined: BatchedDataDict = BatchedDataDict.from_batches(
        [*kept, *spare], pad_value_dict={"input_ids": pad_id}
    )
    return joined.slice(0, prompts * rollouts_per_prompt), sampled


def teaches(
    batch: BatchedDataDict,
    rollouts_per_prompt: int,
    credit: Literal["trajectory", "turn"] = "trajectory",
) -> Tensor:
    """bool [B]: the rewards of the row's group differ, and still do once they are shaped.

    DAPO compares the verifier's rewards, without what length adds to them; a bound on the reward
    (``trainer.ppo.reward.clip``) may take the difference away. The rows of a group go together: one
    that does not count (``sample_mask`` 0) is not compared, and is kept with the others. With
    ``credit="turn"`` rewards of turns are compared, where the batch is of conversations.
    """
    groups = torch.arange(batch.size) // rollouts_per_prompt
    counts = batch["sample_mask"]
    turns = batch.get("turn_ids") if credit == "turn" else None
    name = "rewards" if turns is None else "turn_rewards"
    varied = has_reward_variance(batch[name], groups, counts, turns)
    varied &= has_reward_variance(batch[f"shaped_{name}"], groups, counts, turns)
    return varied.view(-1, rollouts_per_prompt).any(1).repeat_interleave(rollouts_per_prompt)
