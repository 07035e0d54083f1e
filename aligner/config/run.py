"""The root of the configuration."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from aligner.config.cluster import ClusterConfig
from aligner.config.data import DataConfig
from aligner.config.experiment import BackendConfig, ExpManagerConfig
from aligner.config.fields import Natural
from aligner.config.generation import GenerationConfig
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
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)

    @property
    def value_world_size(self) -> int:
        """Workers of the critic."""
        return self.cluster.value_workers or self.trainer.world_size

    def as_dict(self) -> dict[str, Any]:
        """The whole tree as JSON has it: mappings, lists and plain values."""
        return json.loads(json.dumps(asdict(self)))
