"""Base of the trainers that learn from the policy's own responses, its rollouts and its inputs.

Rollouts of the training prompts are sampled when a step needs them, or one step ahead
(asynchronous, one step off-policy)::

    step k     take rollout k, refit, begin rollout k+1 ─── score, train on rollout k
    engines                           └─ sample rollout k+1 with the weights before that training ─┐
    step k+1   take rollout k+1, refit, begin rollout k+2 ...                                  ◄─┘

A validation or a run state between two steps drains the rollout in flight. As configured, the
rollout is either finished with its old weights, or abandoned, and the next step samples its prompts
again with the new weights. Neither result depends on the progress of the rollout, so an interrupted
and an uninterrupted run see the same rollouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aligner.algorithms.rollout.inputs import (
    Prompts,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.reward_source import RewardSource, load_reward
from aligner.algorithms.rollout.rollout import (
    ConversationsAhead,
    RolloutSource,
    SingleTurn,
    prompts_batch,
    rollout_of,
)
from aligner.algorithms.rollout.validation import validate_on_prompts
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.loop import Learner, StepResult
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import role_memory, startup_summary
from aligner.config import SamplingRunConfig
from aligner.data.dataset import PromptSampler
from aligner.data.prompts import PromptDataset, collate_prompts
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.metrics import PhaseTimers
from aligner.observe.startup import StartupSummary, TrainedRole, batch_arithmetic
from aligner.rewards.interface import RewardInterface

# Columns that follow from the prompt indices. Their values may be unsuitable for a run state.
_DATA_COLUMNS = ("ground_truths", "columns")


class Rollouts:
    """The training rollouts of a run, in the order of ``sampler``, which the caller shares.

    ``config.generation`` decides about prefetching. The default ``source`` is `SingleTurn`.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        generation: GenerationInterface,
        prompts: PromptDataset,
        sampler: PromptSampler,
        pad_id: int,
        source: RolloutSource | None = None,
    ) -> None:
        self.source = source or SingleTurn()
        self._ahead = config.generation.async_rollouts
        self._abandons = config.generation.in_flight == "abandon"
        self._changes = config.exp_manager.resume_changed + config.exp_manager.accept_changed
        self._seed = config.seed
        self._per_prompt = config.model.rollout.num_rollouts_per_prompt
        self._generation = generation
        self._prompts, self._sampler, self.pad_id = prompts, sampler, pad_id
        # Prompts of the next rollout if it has begun, and its future or its batch.
        self._indices: list[int] | None = None
        self._pending: PendingGeneration | None = None
        self._batch: BatchedDataDict | None = None

    def take(
        self, first_sample_id: int, *, more: bool, prompts: int | None = None
    ) -> BatchedDataDict:
        """Return the next rollout batch (`RolloutSource.collect`) and begin the one after it.

        ``first_sample_id`` is the id of the first row. ``more`` means that another step follows.
        ``prompts`` is the number of prompts of a rollout that has not begun, by default the
        sampler's batch size.
        """
        # Use the rollout that was begun, or sample one now.
        self._finish()
        indices, batch = self._indices, self._batch
        self._indices = self._batch = None
        if indices is None:
            indices = self._sampler.next_batch(prompts)
        data = self._data(indices, first_sample_id)
        if batch is None:
            batch = self.source.collect(
                self._generation, data, seed=self._seed, per_prompt=self._per_prompt
            )
        elif "output_ids" in batch:  # an older run state contains the engine's output
            batch = rollout_of(data, batch)
        # Begin the next one before this one is scored and trained on.
        if self._ahead and more:
            self._begin(first_sample_id + data.size)
        return BatchedDataDict({**batch, **{name: data[name] for name in _DATA_COLUMNS}})

    def drain(self) -> None:
        """Finish or abandon the rollout in flight, as configured."""
        if self._pending is not None and self._abandons:
            self._pending.abandon()
            self._pending = None
        self._finish()

    def close(self) -> None:
        """Abandon conversations in flight, because environments outlive the sampling workers."""
        if isinstance(self._pending, ConversationsAhead):
            self._pending.abandon()
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts that are drawn but not yet used by a step, and their responses."""
        self.drain()
        output = None
        if self._batch is not None:
            output = {
                name: column for name, column in self._batch.items() if name not in _DATA_COLUMNS
            }
        return {"indices": self._indices, "output": output}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Invert `state_dict`. If settings may have changed, responses are sampled again."""
        indices, output = state["indices"], state["output"]
        if self._changes:
            output, indices = None, indices if max(indices or [0]) < len(self._prompts) else None
        self._indices = None if indices is None else list(indices)
        self._batch = None if output is None else BatchedDataDict(output)
        self._pending = None

    def _begin(self, first_sample_id: int) -> None:
        assert isinstance(self._generation, BackgroundGeneration), "see `EngineConfig.draws_ahead`"
        self._indices = self._sampler.next_batch()
        self._generation.prepare_for_generation()
        data = self._data(self._indices, first_sample_id)
        self._pending = self.source.begin(
            self._generation, data, seed=self._seed, per_prompt=self._per_prompt
        )

    def _finish(self) -> None:
        if self._pending is not None:
            self._batch = self._pending.result()
            self._pending = None

    def _data(self, indices: list[int], first_sample_id: int) -> BatchedDataDict:
        prompts = collate_prompts([self._prompts[index] for index in indices], self.pad_id)
        return prompts_batch(prompts, first_sample_id, self._per_prompt)


@dataclass(kw_only=True, eq=False)
class SamplingTrainer(Learner):
    """Base of a trainer whose steps begin with a rollout.

    ``generation`` samples the responses: the policy itself, or its engines. ``total_steps`` is the
    last step that a rollout may begin for, or None if unknown.
    """

    config: SamplingRunConfig
    policy: Policy
    value: Value | None = None
    reward: RewardInterface
    prompts: Prompts
    sampler: PromptSampler
    generation: GenerationInterface
    pad_id: int
    total_steps: int | None = None
    rollout_source: RolloutSource | None = None
    consumed_samples: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        critic = {} if self.value is None else {"value": self.value}
        self.roles = {"policy": self.policy, **critic}
        self.rollouts = Rollouts(
            self.config,
            self.generation,
            self.prompts.train,
            self.sampler,
            self.pad_id,
            self.rollout_source,
        )

    def has_next(self, step: int) -> bool:
        """Return whether another step follows ``step``."""
        return self.total_steps is None or step < self.total_steps

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample and score responses to the validation prompts, as ``validation`` configures."""
        held_out = self.prompts.held_out
        if not held_out:
            return StepResult({})
        with timers("validate"):
            # A rollout in flight was begun with older weights.
            self.rollouts.drain()
            source, generation = self.rollouts.source, self.generation
            return validate_on_prompts(
                self.config, source, generation, self.reward, held_out, step, self.pad_id
            )

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the sampler's position and a prefetched rollout."""
        return {"rollouts": self.rollouts.state_dict(), **super().state_dict()}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore a `state_dict` and the roles' folders in ``folder``."""
        super().load(state, folder)
        self.rollouts.load_state_dict(state["rollouts"])
        self.generation.weights_changed()


Trainer = TypeVar("Trainer", bound=SamplingTrainer)


@dataclass(frozen=True)
class SamplingInputs:
    """Inputs of a run that samples, read and checked before models are built."""

    config: SamplingRunConfig
    prompts: Prompts
    reward: RewardSource
    environments: RolloutSource | None

    @classmethod
    def load(cls, run: Run[SamplingRunConfig]) -> "SamplingInputs":
        """Read the prompts, load the reward and start the environments, all until the run ends."""
        prompts = load_prompts(run)
        columns = prompts.train.column_names
        reward = load_reward(run.config, run.engine, run.tokenizer, columns, run.closing)
        environments = load_environments(run, prompts)
        return cls(run.config, of_dry_run(run, prompts), reward, environments)

    def start(
        self,
        kind: type[Trainer],
        workers: Workers,
        policy: Policy,
        sampler: PromptSampler,
        steps: int,
        *,
        value: Value | None = None,
        **options: Any,
    ) -> Trainer:
        """Start the sampling engines and the reward, and return a trainer of the class ``kind``.

        A reward model may share the body of the critic ``value``. ``options`` are additional
        arguments of ``kind``.
        """
        engines = start_generation(self.config, workers, policy, self.prompts.max_length)
        trainer = kind(
            config=self.config,
            policy=policy,
            value=value,
            reward=self.reward.start(workers, value),
            prompts=self.prompts,
            sampler=sampler,
            generation=engines or policy,
            pad_id=workers.tokenizer.pad_id,
            total_steps=steps,
            rollout_source=self.environments,
            **options,
        )
        workers.closing.callback(trainer.rollouts.close)
        return trainer

    def summary(
        self,
        workers: Workers,
        trainer: SamplingTrainer,
        steps: int,
        *,
        critic: TrainedRole | None = None,
        passes: int = 1,
        with_reference: bool = False,
        restores: Sequence[str],
        notes: Sequence[str],
    ) -> StartupSummary:
        """Return the start-up report of a run of ``steps`` steps.

        Policy and ``critic`` train ``passes`` times on every rollout. ``with_reference`` means that
        the initial policy is kept. ``restores``: names of the parts of a run state besides the
        roles. ``notes`` are additional lines.
        """
        config, architecture, rollout = self.config, workers.architecture, self.config.model.rollout
        data_size = config.model.parallel.data_size(workers.clusters.policy.world_size())
        model = config.model
        # Batches and updates of a step.
        policy = TrainedRole("policy", model.global_batch_size, model.micro_batch_size)
        batches = batch_arithmetic(
            rollout,
            [policy] if critic is None else [critic, policy],
            steps=steps,
            train_prompts=len(self.prompts.train),
            data_parallel_size=data_size,
            passes=passes,
        )
        # Memory of all roles per process.
        memory = [role_memory(config, architecture, data_size, "policy")]
        if critic is not None:
            size = critic.data_parallel_size or data_size
            layout = critic.model_parallel_size
            memory.append(
                role_memory(config, architecture, size, "critic", model_parallel_size=layout)
            )
        if with_reference and model.peft.lora is None:  # with LoRA: the policy without adapters
            memory.append(
                role_memory(config, architecture, data_size, "reference", trainable=False)
            )
        generation_note = trainer.generation.in_words()
        return startup_summary(
            workers,
            batches,
            [*memory, *self.reward.memory()],
            self.prompts.train.max_length + rollout.length_params.max_length,
            restores=["policy", *([] if critic is None else ["critic"]), *restores],
            notes=[
                *notes,
                *self.prompts.notes(),
                *self.reward.notes(),
                *filter(None, [generation_note]),
            ],
        )
