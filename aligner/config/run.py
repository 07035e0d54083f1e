"""The roots of the configuration."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pydantic import StrictBool

from aligner.config.algorithms.distill import DistillTrainerConfig, StudentConfig, TeacherConfig
from aligner.config.algorithms.preference import (
    DPOTrainerConfig,
    PairDataConfig,
    PreferenceDataConfig,
)
from aligner.config.algorithms.reward_model import RewardDataConfig, RewardTrainerConfig
from aligner.config.algorithms.supervised import ExampleDataConfig, SFTTrainerConfig
from aligner.config.algorithms.trainer import (
    LoopConfig,
    RSTrainerConfig,
    SamplingLoopConfig,
    SupervisedLoopConfig,
    TrainerConfig,
    TrainingConfig,
)
from aligner.config.cluster import ClusterConfig
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
    """Options of a run of any algorithm; each has its own ``model``, ``data`` and ``trainer``."""

    model: TrainedModelConfig
    trainer: TrainingConfig
    seed: Natural = 1234
    """Seed of sampling, shuffling, dropout and fresh weights."""

    dry_run: StrictBool = False
    """Two steps on the longest batch that the run can meet, of random tokens; nothing is saved.

    Peak memory and time of every phase are printed, and the run's directory is neither read nor
    written (docs/plan.md#on-the-real-device).
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)

    @property
    def loop(self) -> LoopConfig:
        """The algorithm's section of ``trainer``."""
        raise NotImplementedError

    @property
    def value_parallel(self) -> ParallelConfig:
        """The critic's layout."""
        return self.model.parallel

    @property
    def monitor(self) -> str:
        """Metric that decides which run state is best."""
        return self.exp_manager.monitor or "val_rollouts/accuracy"

    @property
    def value_world_size(self) -> int:
        """Workers of the critic; 0: there is none."""
        return 0

    @property
    def generation_world_size(self) -> int:
        """Workers that only generate and have room of their own; 0: there are none."""
        return 0

    @property
    def reward_world_size(self) -> int:
        """Workers of a reward model that have room of their own; 0: there are none."""
        return 0

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, in a few words."""
        return algorithm_of(self.as_dict()).name

    @property
    def section(self) -> str:
        """Key of the algorithm's section: ``trainer.ppo``, ``trainer.sft``, …"""
        return f"trainer.{algorithm_of(self.as_dict()).section}"

    def as_dict(self) -> dict[str, Any]:
        """The whole tree as JSON has it: mappings, lists and plain values."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class SamplingRunConfig(BaseRunConfig):
    """Options of a run that learns from responses it samples."""

    reward: RewardConfig
    data: DataConfig
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    @property
    def generation_world_size(self) -> int:
        """Workers that only generate and have room of their own; 0: there are none."""
        vllm = self.generation.vllm
        apart = self.generation.backend == "vllm" and vllm.refit == "separate"
        return vllm.workers if apart else 0

    @property
    def reward_world_size(self) -> int:
        """Workers of a reward model that have room of their own; 0: there are none."""
        return 0 if self.reward.model is None else self.reward.model.workers or 0

    @property
    def monitor(self) -> str:
        """Metric that decides which run state is best.

        Without a verifier ``accuracy`` is the share of rewards of at least 1, which of a reward
        model's scores means little.
        """
        if self.exp_manager.monitor is None and self.reward.function is None:
            return "val_rollouts/rewards"
        return super().monitor

    @property
    def loop(self) -> SamplingLoopConfig:
        """The algorithm's section of ``trainer``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RunConfig(SamplingRunConfig):
    """All options of a PPO run."""

    model: ModelConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig | None = field(default_factory=CriticConfig)
    """The critic; null: none is built."""

    @property
    def loop(self) -> SamplingLoopConfig:
        """See ``trainer.ppo``."""
        return self.trainer.ppo

    @property
    def value_parallel(self) -> ParallelConfig:
        """The critic's layout; the policy's unless it has its own."""
        critic = self.critic
        return (self.model if critic is None else critic.laid_out(self.model)).parallel

    @property
    def value_world_size(self) -> int:
        """Workers of the critic; 0: there is none."""
        if self.critic is None:
            return 0
        return self.cluster.value_workers or self.trainer.world_size


@dataclass(frozen=True, kw_only=True)
class RSRunConfig(SamplingRunConfig):
    """All options of a rejection-sampling run."""

    model: RSModelConfig
    trainer: RSTrainerConfig = field(default_factory=RSTrainerConfig)

    @property
    def loop(self) -> SamplingLoopConfig:
        """See ``trainer.rs``."""
        return self.trainer.rs


@dataclass(frozen=True, kw_only=True)
class SupervisedRunConfig(BaseRunConfig):
    """Options of a run that learns from given examples."""

    data: ExampleDataConfig | PairDataConfig

    @property
    def loop(self) -> SupervisedLoopConfig:
        """The algorithm's section of ``trainer``."""
        raise NotImplementedError

    @property
    def rows_per_example(self) -> int:
        """Adjacent rows of a batch that belong together."""
        return 1


@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(SupervisedRunConfig):
    """All options of a fine-tuning run."""

    data: ExampleDataConfig
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    @property
    def loop(self) -> SupervisedLoopConfig:
        """See ``trainer.sft``."""
        return self.trainer.sft


@dataclass(frozen=True, kw_only=True)
class DistillRunConfig(SupervisedRunConfig):
    """All options of a distillation run."""

    model: StudentConfig
    teacher: TeacherConfig
    data: ExampleDataConfig
    trainer: DistillTrainerConfig = field(default_factory=DistillTrainerConfig)

    @property
    def loop(self) -> SupervisedLoopConfig:
        """See ``trainer.distill``."""
        return self.trainer.distill


@dataclass(frozen=True, kw_only=True)
class DPORunConfig(SupervisedRunConfig):
    """All options of a run of preference optimisation."""

    data: PreferenceDataConfig
    trainer: DPOTrainerConfig = field(default_factory=DPOTrainerConfig)

    @property
    def loop(self) -> SupervisedLoopConfig:
        """See ``trainer.dpo``."""
        return self.trainer.dpo

    @property
    def rows_per_example(self) -> int:
        """Adjacent rows of a batch that belong together."""
        return 2 if self.trainer.dpo.is_paired else 1


@dataclass(frozen=True, kw_only=True)
class RewardRunConfig(SupervisedRunConfig):
    """All options of a run that trains a reward model."""

    data: RewardDataConfig
    trainer: RewardTrainerConfig = field(default_factory=RewardTrainerConfig)

    @property
    def loop(self) -> SupervisedLoopConfig:
        """See ``trainer.reward_model``."""
        return self.trainer.reward_model

    @property
    def rows_per_example(self) -> int:
        """Adjacent rows of a batch that belong together."""
        return 1 if self.trainer.reward_model.loss == "regression" else 2


class Algorithm(NamedTuple):
    """An algorithm by its name, and what its run state is made of."""

    name: str
    section: str  # of ``trainer``
    has_critic: bool

    @property
    def directory(self) -> str:
        """The name as part of a directory's, such as ``dr_grpo``."""
        plain = self.name.lower().replace("reinforce++", "reinforce_plus_plus")
        return re.sub(r"[^a-z0-9]+", "_", plain.replace(" with a baseline", "_baseline")).strip("_")


_ESTIMATORS = {
    "gae": "PPO",
    "reinforce": "REINFORCE",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline",
}


def algorithm_of(config: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a run whose configuration is ``config`` (`BaseRunConfig.as_dict`).

    Also of a saved run's, which may be of an earlier version.
    """
    sections = ("ppo", "rs", "sft", "dpo", "reward_model", "distill")
    trainer = config["trainer"]
    section = next(name for name in sections if name in trainer)
    loop = trainer[section]
    names = {
        "rs": "Rejection sampling",
        "sft": "Fine-tuning",
        "dpo": f"Preference optimisation ({loop.get('loss', 'dpo').upper()})",
        "reward_model": f"Reward model ({loop.get('loss', '').replace('_', ' ')})",
    }
    if section == "ppo":
        estimator = loop.get("advantage", {}).get("estimator", "gae")
        name = _ESTIMATORS.get(estimator, f"Policy gradients ({estimator})")
        variants = _variants(loop, config.get("model", {}).get("ppo", {}))
        if estimator == "grpo" and variants:
            name = ", ".join(variants)
        elif variants:
            name += f" ({', '.join(variants)})"
    elif section == "distill":
        where = "on-policy" if loop.get("on_policy") else "offline"
        name = f"Distillation ({where}, {loop.get('kl')} KL)"
    else:
        name = names[section]
    return Algorithm(name, section, config.get("critic") is not None)


def _variants(loop: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    """Names of the published variants of GRPO whose options are set, as in docs/reinforce.md."""
    eps = policy.get("ratio_eps")
    clips_higher = isinstance(eps, Sequence) and len(set(eps)) > 1
    is_set = {
        "DAPO": loop.get("dynamic_sampling", {}).get("enabled") and clips_higher,
        "GSPO": policy.get("ratio_level") == "sequence",
        "CISPO": policy.get("surrogate") == "cispo",
    }
    return [name for name, value in is_set.items() if value]
