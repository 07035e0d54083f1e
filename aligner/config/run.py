"""The root of the configuration."""

from dataclasses import dataclass, field

from aligner.config.data import DataConfig
from aligner.config.experiment import BackendConfig, ClusterConfig, ExpManagerConfig
from aligner.config.fields import Natural
from aligner.config.model import CriticConfig, ModelConfig
from aligner.config.reward import RewardConfig
from aligner.config.trainer import TrainerConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is told."""

    model: ModelConfig
    reward: RewardConfig
    data: DataConfig
    seed: Natural = 1234  # of sampling, shuffling and fresh weights
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    generation: BackendConfig = field(default_factory=BackendConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)
