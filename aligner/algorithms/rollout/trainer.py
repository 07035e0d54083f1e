"""Base class of trainers that learn from responses of the policy, with rollouts and inputs.

Rollouts of the training prompts are sampled when a step needs them, or one step ahead
(asynchronous, one step off-policy)::

    step k     take rollout k, update the engines' weights, begin rollout k+1 ─── train on rollout k
    engines                                                 └─ sample rollout k+1

A validation or a run state between two steps finishes or abandons the pending rollout
(``generation.in_flight``). The next step samples abandoned prompts again. The result is independent
of the progress of the pending rollout, so interrupted and uninterrupted runs get equal rollouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aligner.algorithms.rollout import inputs
from aligner.algorithms.rollout.rollout import (
    ConversationsAhead,
    RolloutSource,
    SingleResponses,
    prompts_batch,
    rollout_of,
)
from aligner.algorithms.rollout.validation import validate_on_prompts
from aligner.algorithms.run.directory import sampler_and_steps
from aligner.algorithms.run.dry_run import longest_set
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.loop import Learner, StepResult
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import role_memory, startup_summary
from aligner.config import RunConfig, SamplingRunConfig
from aligner.data.batches import PromptSampler, collate_prompts
from aligner.data.prompts import PromptDataset, columns_of_rows
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.metrics import PhaseTimers
from aligner.observe.startup import StartupSummary, TrainedRole, batch_arithmetic
from aligner.rewards.interface import RewardInterface

# Columns that are read again from the data. Run states may not support the types of their values.
_DATA_COLUMNS = ("ground_truths", "columns")


@dataclass(eq=False)
class Rollouts:
    """Training rollouts of a run. ``sampler`` draws their prompts."""

    config: SamplingRunConfig
    generation: GenerationInterface
    prompts: PromptDataset
    sampler: PromptSampler
    pad_id: int
    source: RolloutSource = field(default_factory=SingleResponses)
    # Next rollout if it has begun: indices of the prompts, and the pending result or the batch.
    _indices: list[int] | None = field(default=None, init=False)
    _pending: PendingGeneration | None = field(default=None, init=False)
    _batch: BatchedDataDict | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._per_prompt = self.config.model.rollout.num_rollouts_per_prompt

    def take(
        self, first_sample_id: int, *, more: bool, prompts: int | None = None
    ) -> BatchedDataDict:
        """Return the next rollout batch. If rollouts are asynchronous, begin the following rollout.

        ``first_sample_id``: sample id of the first row. ``more``: whether another step follows.
        ``prompts``: number of prompts if the rollout has not begun yet (default: the sampler's
        batch size).
        """
        # Wait for the pending rollout, or sample a rollout now.
        self._finish()
        indices, batch = self._indices, self._batch
        self._indices = self._batch = None
        if indices is None:
            indices = self.sampler.next_batch(prompts)
        data = self._data(indices, first_sample_id)
        seed, per_prompt = self.config.seed, self._per_prompt
        if batch is None:
            batch = self.source.collect(self.generation, data, seed=seed, per_prompt=per_prompt)
        elif "output_ids" in batch:  # the output of an engine
            batch = rollout_of(data, batch)
        # Begin the following rollout before this one is scored and trained on.
        if self.config.generation.async_rollouts and more:
            engine = self.generation
            assert isinstance(engine, BackgroundGeneration), "see `EngineConfig.draws_ahead`"
            engine.prepare_for_generation()
            self._indices = self.sampler.next_batch()
            following = self._data(self._indices, first_sample_id + data.size)
            self._pending = self.source.begin(engine, following, seed=seed, per_prompt=per_prompt)
        return BatchedDataDict({**batch, **{name: data[name] for name in _DATA_COLUMNS}})

    def drain(self) -> None:
        """Finish or abandon the pending rollout, as ``generation.in_flight`` configures."""
        if self._pending is not None and self.config.generation.in_flight == "abandon":
            self._pending.abandon()
            self._pending = None
        self._finish()

    def close(self) -> None:
        """Abandon unfinished conversations. Call this before the sampling workers are shut down."""
        if isinstance(self._pending, ConversationsAhead):
            self._pending.abandon()
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """Return prompt indices of the next step if already drawn, and responses if sampled."""
        self.drain()
        batch = self._batch
        output = batch and {name: batch[name] for name in batch if name not in _DATA_COLUMNS}
        return {"indices": self._indices, "output": output}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, a result of `state_dict`.

        If the run accepts changed settings (``exp_manager.resume_changed`` or ``accept_changed``),
        the saved responses are discarded, and their prompts are sampled again.
        """
        indices, output = state["indices"], state["output"]
        if self.config.exp_manager.resume_changed or self.config.exp_manager.accept_changed:
            output, indices = None, indices if max(indices or [0]) < len(self.prompts) else None
        self._indices = None if indices is None else list(indices)
        self._batch = None if output is None else BatchedDataDict(output)
        self._pending = None

    def _finish(self) -> None:
        if self._pending is not None:
            self._batch = self._pending.result().to("cpu")
            self._pending = None

    def _data(self, indices: list[int], first_sample_id: int) -> BatchedDataDict:
        prompts = collate_prompts([self.prompts.items[index] for index in indices], self.pad_id)
        return prompts_batch(prompts, first_sample_id, self._per_prompt)


@dataclass(kw_only=True, eq=False)
class SamplingTrainer(Learner):
    """Base class of trainers whose steps begin with a rollout."""

    config: SamplingRunConfig
    policy: Policy
    value: Value | None = None
    reward: RewardInterface
    prompts: inputs.Prompts
    sampler: PromptSampler
    generation: GenerationInterface  # the policy, or separate sampling engines
    pad_id: int
    total_steps: int | None = None  # index of the last step, if known
    rollout_source: RolloutSource = field(default_factory=SingleResponses)
    consumed_samples: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        critic = {} if self.value is None else {"value": self.value}
        self.roles = {"policy": self.policy, **critic}
        train, pad_id, source = self.prompts.train, self.pad_id, self.rollout_source
        self.rollouts = Rollouts(self.config, self.generation, train, self.sampler, pad_id, source)

    def has_next(self, step: int) -> bool:
        """Return whether another step follows ``step``."""
        return self.total_steps is None or step < self.total_steps

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample and score responses to the validation prompts, as ``validation`` configures."""
        held_out, source = self.prompts.held_out, self.rollouts.source
        if not held_out:
            return StepResult({})
        with timers("validate"):
            self.rollouts.drain()  # a pending rollout uses older weights
            return validate_on_prompts(
                self.config, source, self.generation, self.reward, held_out, step, self.pad_id
            )

    def state_dict(self) -> dict[str, Any]:
        """Return counters, data position and the next rollout, if sampled ahead."""
        return {"rollouts": self.rollouts.state_dict(), **super().state_dict()}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore ``state``, a result of `state_dict`, and load the models from ``folder``."""
        super().load(state, folder)
        self.rollouts.load_state_dict(state["rollouts"])
        self.generation.weights_changed()


Trainer = TypeVar("Trainer", bound=SamplingTrainer)


@dataclass(frozen=True)
class SamplingInputs:
    """Prompts, reward and environments of a run, checked before models are built."""

    config: SamplingRunConfig
    prompts: inputs.Prompts
    reward: inputs.RewardSource
    environments: RolloutSource | None

    @classmethod
    def load(cls, run: Run[SamplingRunConfig]) -> "SamplingInputs":
        """Read the prompts, load the reward and start the environments, until the run ends."""
        config, tokenizer, architecture = run.config, run.tokenizer, run.architecture
        prompts = inputs.load_prompts(run)
        names = prompts.train.column_names
        reward = inputs.load_reward(config, run.engine, tokenizer, names, run.closing)
        # Environments receive the columns of all sets.
        sets = {"data.train": prompts.train, "data.validation": prompts.validation}
        sets |= {f"validation.sets.{name}": prompts for name, prompts in prompts.sets.items()}
        columns = columns_of_rows(sets)
        environments = inputs.open_environments(
            config, tokenizer, architecture, columns, run.closing
        )
        if config.dry_run:
            prompts = inputs.Prompts(longest_set(config, prompts.train, tokenizer, architecture))
        return cls(config, prompts, reward, environments)

    def sampler_and_steps(self) -> tuple[PromptSampler, int]:
        """Return the sampler that draws each step's prompts, and the number of steps."""
        rollout = self.config.model.rollout
        count = rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
        return sampler_and_steps(self.config, self.prompts.train, count)

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
        """Start sampling engines and reward, and construct a trainer ``kind`` with ``options``."""
        engines = inputs.start_generation(self.config, workers, policy, self.prompts.max_length)
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
            rollout_source=self.environments or SingleResponses(),
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
        passes: int = 1,
        with_reference: bool = False,
        restores: Sequence[str],
        notes: Sequence[str],
    ) -> StartupSummary:
        """Return the start-up report. ``restores``: parts of a run state in addition to models."""
        config, model, architecture = self.config, self.config.model, workers.architecture
        data_size = model.parallel.data_size(workers.clusters.policy.world_size())
        # Batches and memory of the trained roles.
        roles = [TrainedRole("policy", model.global_batch_size, model.micro_batch_size)]
        memory = [role_memory(config, architecture, data_size, "policy")]
        if isinstance(config, RunConfig) and config.critic is not None:
            critic, layout = config.critic, config.value_parallel
            parts = layout.model_parallel_size
            size = layout.data_size(workers.clusters.value.world_size())
            batches = (critic.global_batch_size, critic.micro_batch_size)
            roles.insert(0, TrainedRole("critic", *batches, size))
            memory += [role_memory(config, architecture, size, "critic", model_parallel_size=parts)]
        if with_reference and model.peft.lora is None:  # with LoRA: the policy without adapters
            memory += [role_memory(config, architecture, data_size, "reference", trainable=False)]
        sentences = batch_arithmetic(
            model.rollout,
            roles,
            steps=steps,
            train_prompts=len(self.prompts.train),
            data_parallel_size=data_size,
            passes=passes,
        )
        engine = filter(None, [trainer.generation.in_words()])
        return startup_summary(
            workers,
            sentences,
            [*memory, *self.reward.memory()],
            self.prompts.train.max_length + model.rollout.length_params.max_length,
            restores=[*(role.name for role in reversed(roles)), *restores],
            notes=[*notes, *self.prompts.notes(), *self.reward.notes(), *engine],
        )
