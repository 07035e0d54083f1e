"""Configurations of training runs, one class per algorithm."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import StrictBool

from aligner.config.algorithms.names import algorithm_of
from aligner.config.algorithms.preference import (
    DPOTrainerConfig,
    PairDataConfig,
    PreferenceDataConfig,
    RewardDataConfig,
    RewardTrainerConfig,
)
from aligner.config.algorithms.process import TrainingConfig
from aligner.config.algorithms.supervised import (
    DistillTrainerConfig,
    ExampleDataConfig,
    SFTTrainerConfig,
    StudentConfig,
    TeacherConfig,
)
from aligner.config.algorithms.trainer import RSTrainerConfig, TrainerConfig
from aligner.config.cluster import ClusterConfig
from aligner.config.combinations import ReadIf, multiples_near
from aligner.config.data import DataConfig
from aligner.config.environment import EnvironmentConfig
from aligner.config.experiment import ExpManagerConfig
from aligner.config.fields import Natural
from aligner.config.generation import GenerationConfig
from aligner.config.layout import ParallelConfig
from aligner.config.reward import RewardConfig
from aligner.config.roles.model import CriticConfig, ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.config.roles.policy import BackendConfig
from aligner.config.validation import ValidationConfig


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig:
    """Options of every training run. Subclasses specialise ``model``, ``data`` and ``trainer``."""

    model: TrainedModelConfig
    trainer: TrainingConfig
    seed: Natural = 1234
    """Seed of sampling, shuffling, dropout and new weights."""

    dry_run: StrictBool = False
    """Measure memory and time of two steps, without saving (docs/plan.md#on-the-real-device)."""

    download: StrictBool = False
    """Download models and data that are named as on Hugging Face's hub (docs/ppo.md#data). Without
    it such names are looked up in the local cache."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)

    @property
    def critic(self) -> CriticConfig | None:
        """Section of the critic, or None. Only `RunConfig` has a critic."""
        return None

    @property
    def loop(self) -> Any:
        """Section of the algorithm in ``trainer``, an instance of `LoopConfig`."""
        return getattr(self.trainer, self.section.removeprefix("trainer."))

    @property
    def value_parallel(self) -> ParallelConfig:
        """Parallel layout of the critic. Without a critic, the policy's layout."""
        model = self.model if self.critic is None else self.critic.with_layout(self.model)
        return model.parallel

    @property
    def monitor(self) -> str:
        """Name of the metric that decides which run state is the best."""
        return self.exp_manager.monitor or "val_rollouts/accuracy"

    @property
    def value_world_size(self) -> int:
        """Number of worker processes of the critic, 0 without a critic."""
        workers = self.cluster.value_workers or self.trainer.world_size
        return 0 if self.critic is None else workers

    @property
    def generation_world_size(self) -> int:
        """Number of engine processes on devices that the policy does not use."""
        return 0

    @property
    def reward_world_size(self) -> int:
        """Number of separate worker processes of a reward model."""
        return 0

    @property
    def trained_roles(self) -> dict[str, TrainedModelConfig | CriticConfig]:
        """Sections of the trained models, by key: ``model`` and, with a critic, ``critic``."""
        roles = {"model": self.model, "critic": self.critic}
        return {name: section for name, section in roles.items() if section is not None}

    @property
    def algorithm(self) -> str:
        """Title of the algorithm, such as "Rejection sampling"."""
        return algorithm_of(self.as_dict()).name

    @property
    def section(self) -> str:
        """Dotted key of the algorithm's section: ``trainer.ppo``, ``trainer.sft``, …"""
        return f"trainer.{algorithm_of(self.as_dict()).section}"

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values: dicts, lists and scalars."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def has_environment(self) -> bool:
        """True if the policy converses with an environment."""
        return False

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each global batch that cannot be split over the processes."""
        return self.share_problems(self.trainer.world_size, self.value_world_size)

    def share_problems(self, world_size: int, value_world_size: int = 0) -> Iterator[str]:
        """Yield an error message for each global batch that these process counts cannot split."""
        for role, section in self.trained_roles.items() if not self.model.token_budgets else ():
            # The critic may have another layout and other workers.
            is_critic = role == "critic"
            layout = self.value_parallel if is_critic else self.model.parallel
            ranks = max(1, layout.data_size(value_world_size if is_critic else world_size))
            batch, per_pass = section.global_batch_size, section.micro_batch_size * ranks
            if batch % per_pass:
                workers = ", or of cluster.value_workers" if is_critic else ""
                processes = f" (of trainer.devices x trainer.num_nodes{workers})"
                yield (
                    f"{role}.global_batch_size={batch} is not a multiple of "
                    f"{role}.micro_batch_size={section.micro_batch_size} x {ranks} data-parallel "
                    f"ranks = {per_pass}{processes if ranks > 1 else ''}. Use "
                    f"{multiples_near(batch, per_pass)}"
                )


@dataclass(frozen=True, kw_only=True)
class SamplingRunConfig(BaseRunConfig):
    """Options of a run that samples responses and learns from them."""

    reward: RewardConfig
    data: DataConfig
    environment: Annotated[
        EnvironmentConfig,
        ReadIf(
            lambda run: run.has_environment,
            "needs an environment: set reward=environment and environment.factory",
        ),
    ] = field(default_factory=EnvironmentConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    validation: Annotated[
        ValidationConfig,
        ReadIf(
            lambda run: run.data.validation is not None or bool(run.validation.sets),
            "needs validation data: set data.validation.source",
        ),
    ] = field(default_factory=ValidationConfig)

    @property
    def generation_world_size(self) -> int:
        """Number of engine processes on devices that the policy does not use."""
        resources = self.generation.resources(has_gpu=True)
        return 0 if resources is None or resources.shares_devices else resources.workers

    @property
    def reward_world_size(self) -> int:
        """Number of separate worker processes of a reward model."""
        return 0 if self.reward.model is None else self.reward.model.workers or 0

    @property
    def monitor(self) -> str:
        """Name of the metric that decides which run state is the best."""
        # Without a verifier, accuracy would be the share of a reward model's scores of at least 1.
        if self.exp_manager.monitor is None and self.reward.function is None:
            return "val_rollouts/rewards"
        return super().monitor

    @property
    def has_environment(self) -> bool:
        """True if the policy converses with an environment."""
        return self.environment.is_set

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the messages of the base class and of `length_problems`."""
        yield from super().problems(key, run)
        yield from self.length_problems(self.data.max_prompt_length or 1)

    def length_problems(self, longest_prompt: int) -> Iterator[str]:
        """Yield an error message for each token limit that prompt and response may exceed."""
        response = self.model.rollout.length_params.max_length
        longest = longest_prompt + response
        for name, tokens in self.model.token_limits.items():
            if tokens < longest:
                yield (
                    f"model.{name}={tokens} is too small for a prompt of {longest_prompt} tokens "
                    f"and {self.model.rollout_key}.length_params.max_length={response}. Raise it "
                    f"to at least {longest}"
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig(SamplingRunConfig):
    """All options of a PPO run."""

    model: ModelConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig | None = field(default=CriticConfig())
    """The critic. `null` means no critic."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the base class's messages, and one if global batches do not divide rollouts."""
        yield from super().problems(key, run)
        samples = self.model.ppo.num_rollout_samples
        for role, section in self.trained_roles.items():
            if samples % section.global_batch_size:
                yield (
                    f"model.ppo.num_rollout_samples={samples} is not a multiple of "
                    f"{role}.global_batch_size={section.global_batch_size}. Use "
                    f"{multiples_near(samples, section.global_batch_size)}"
                )


@dataclass(frozen=True, kw_only=True)
class RSRunConfig(SamplingRunConfig):
    """All options of a rejection-sampling run."""

    model: RSModelConfig
    trainer: RSTrainerConfig = field(default_factory=RSTrainerConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if selected responses do not divide into global batches."""
        yield from super().problems(key, run)
        rs, batch = self.model.rs, self.model.global_batch_size
        selected = rs.num_rollout_samples // rs.num_rollouts_per_prompt * rs.top_n_rollouts
        if selected % batch:
            yield (
                f"{selected} selected responses (model.rs.num_rollout_samples="
                f"{rs.num_rollout_samples} / num_rollouts_per_prompt={rs.num_rollouts_per_prompt} "
                f"x top_n_rollouts={rs.top_n_rollouts}) are not a multiple of "
                f"model.global_batch_size={batch}. Use {multiples_near(selected, batch)}"
            )


@dataclass(frozen=True, kw_only=True)
class SupervisedRunConfig(BaseRunConfig):
    """Options of a run that learns from given examples."""

    data: ExampleDataConfig | PairDataConfig

    @property
    def rows_per_example(self) -> int:
        """Number of adjacent rows in a batch that form one example."""
        return 1

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for batches that split examples, and for low token limits."""
        yield from super().problems(key, run)
        for name in ("micro_batch_size", "global_batch_size"):
            if (size := getattr(self.model, name)) % self.rows_per_example:
                yield (
                    f"model.{name}={size} counts rows, and an example has "
                    f"{self.rows_per_example}, the chosen and the rejected response. "
                    f"Use {multiples_near(size, self.rows_per_example)}"
                )
        yield from self.length_problems(self.data.max_length or 1)

    def length_problems(self, longest: int) -> Iterator[str]:
        """Yield an error message for each token limit that rows of ``longest`` tokens exceed."""
        multiple = self.model.length_multiple
        for name, tokens in self.model.token_limits.items():
            rows = self.rows_per_example if name.endswith("train_mb_tokens") else 1
            length = rows * -(-longest // multiple) * multiple
            if tokens < length:
                example = f"an example may have {longest} tokens"
                if rows > 1:
                    example = f"the {rows} rows of an example may have {longest} tokens each"
                yield (
                    f"model.{name}={tokens} is too small, because {example}. Raise it to at least "
                    f"{length}, or lower data.max_length"
                )


@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(SupervisedRunConfig):
    """All options of a fine-tuning run."""

    data: ExampleDataConfig
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


@dataclass(frozen=True, kw_only=True)
class DistillRunConfig(SupervisedRunConfig):
    """All options of a distillation run."""

    model: StudentConfig
    teacher: TeacherConfig
    data: ExampleDataConfig
    trainer: DistillTrainerConfig = field(default_factory=DistillTrainerConfig)


@dataclass(frozen=True, kw_only=True)
class DPORunConfig(SupervisedRunConfig):
    """All options of a preference-optimisation run."""

    data: PreferenceDataConfig
    trainer: DPOTrainerConfig = field(default_factory=DPOTrainerConfig)

    @property
    def rows_per_example(self) -> int:
        """2 for pairs of responses, 1 for KTO."""
        return 2 if self.trainer.dpo.is_paired else 1


@dataclass(frozen=True, kw_only=True)
class RewardRunConfig(SupervisedRunConfig):
    """All options of a run that trains a reward model."""

    data: RewardDataConfig
    trainer: RewardTrainerConfig = field(default_factory=RewardTrainerConfig)

    @property
    def rows_per_example(self) -> int:
        """2 for pairs of responses, 1 for regression."""
        return 1 if self.trainer.reward_model.loss == "regression" else 2
