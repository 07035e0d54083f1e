"""Base of the trainers that learn from the policy's own responses, and the inputs of their runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aligner.algorithms.rollout.inputs import (
    Prompts,
    generation_note,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.prefetch import Rollouts
from aligner.algorithms.rollout.reward_source import RewardSource, load_reward
from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.rollout.validation import validate_on_prompts
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.loop import Learner, StepResult
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import role_memory, startup_summary
from aligner.config import SamplingRunConfig
from aligner.data.dataset import PromptSampler
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.metrics import PhaseTimers
from aligner.observe.startup import StartupSummary, TrainedRole, batch_arithmetic
from aligner.rewards.interface import RewardInterface


@dataclass(kw_only=True, eq=False)
class SamplingTrainer(Learner):
    """Base of a trainer whose steps begin with a rollout.

    Args:
        config: of the run.
        policy: the policy.
        value: the critic, if there is one.
        reward: scores responses.
        prompts: of training and validation.
        sampler: draws the prompts of a step.
        generation: samples the responses; the policy itself, or its engines.
        pad_id: fills prompts on the right.
        total_steps: no rollout is begun for a later step; None: not known.
        rollout_source: of a run over conversations; None: a response to each prompt.
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
        """Return whether a rollout may be begun for the step after ``step``."""
        return self.total_steps is None or step < self.total_steps

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample responses to the validation prompts, as in ``validation``, and score them."""
        held_out, rollouts = self.prompts.held_out, self.rollouts
        return validate_on_prompts(
            self.config, rollouts, self.generation, self.reward, held_out, step, timers
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, the sampler's position and a prefetched rollout."""
        return {"rollouts": self.rollouts.state_dict(), **super().state_dict()}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from a `state_dict` and from the folders of the roles in ``folder``."""
        super().load(state, folder)
        self.rollouts.load_state_dict(state["rollouts"])
        self.generation.weights_changed()


Trainer = TypeVar("Trainer", bound=SamplingTrainer)


@dataclass(frozen=True)
class SamplingInputs:
    """Inputs of a run that samples: read and checked before a model is built."""

    config: SamplingRunConfig
    prompts: Prompts
    reward: RewardSource
    environments: RolloutSource | None

    @classmethod
    def load(cls, run: Run[SamplingRunConfig]) -> "SamplingInputs":
        """Read the prompts, and load the reward and the environments, which end with the run."""
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
        """Start what samples and what scores, and make the trainer of the class ``kind``.

        ``value``: the critic, whose body a reward model may share. ``options``: further arguments
        of ``kind``.
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
        """Summary of a run of ``steps`` steps, for its start-up report.

        Policy and ``critic`` go ``passes`` times over every rollout; ``with_reference``: the
        initial policy is kept; ``restores``: what a run state brings back beside the roles;
        ``notes``: anything else to be read before the first step.
        """
        config, architecture, rollout = self.config, workers.architecture, self.config.model.rollout
        data_size = config.model.parallel.data_size(workers.clusters.policy.world_size())
        model = config.model
        policy = TrainedRole("policy", model.global_batch_size, model.micro_batch_size)
        batches = batch_arithmetic(
            rollout,
            [policy] if critic is None else [critic, policy],
            steps=steps,
            train_prompts=len(self.prompts.train),
            data_parallel_size=data_size,
            passes=passes,
        )
        memory = [role_memory(config, architecture, data_size, "policy")]
        if critic is not None:
            size = critic.data_parallel_size or data_size
            layout = critic.model_parallel_size
            memory.append(
                role_memory(config, architecture, size, "critic", model_parallel_size=layout)
            )
        if with_reference and model.peft.lora is None:  # else it is the policy without adapters
            memory.append(
                role_memory(config, architecture, data_size, "reference", trainable=False)
            )
        return startup_summary(
            workers,
            batches,
            [*memory, *self.reward.memory()],
            self.prompts.train.max_length + rollout.length_params.max_length,
            restores=["policy", *([] if critic is None else ["critic"]), *restores],
            notes=[*notes, *self.prompts.notes(), *generation_note(trainer.generation)],
        )
