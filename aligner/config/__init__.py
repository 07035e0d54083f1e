"""Configuration: one YAML tree, validated once into frozen dataclasses.

The default of a key is defined at its field. ``base`` passes the defaults to hydra, and the files
of ``conf/`` contain overrides only. The docstring below a field describes the key, also in the
tables of ``docs/`` (``docs/tools/options.py``).
"""

# ruff: noqa: F401  (names for the rest of the library)

from aligner.config.algorithms.preference import (
    LOSS_OPTIONS,
    PairDataConfig,
    PreferenceDataConfig,
    RewardDataConfig,
    TrainerDPOConfig,
)
from aligner.config.algorithms.process import ProcessConfig
from aligner.config.algorithms.supervised import ExampleDataConfig, KLDirection, StudentConfig
from aligner.config.algorithms.trainer import ImproperEndConfig, TrainerConfig, TrainerPPOConfig
from aligner.config.commands.ask import (
    AskConfig,
    AskedDataConfig,
    EvaluateConfig,
    GenerateConfig,
    ServeConfig,
)
from aligner.config.data import DataConfig, PromptSourceConfig
from aligner.config.engine import EngineConfig, EngineResources, EngineStart
from aligner.config.environment import EnvironmentConfig
from aligner.config.experiment import ExpManagerConfig
from aligner.config.layout import LayerOptions, LayerSpec, ParallelConfig, check_layout
from aligner.config.load import as_omegaconf, load_config, parse_config, plain_mapping, section_of
from aligner.config.reward import RewardConfig, RewardModelConfig, RewardServerConfig
from aligner.config.roles.model import (
    LAYOUT_KEYS,
    CriticConfig,
    DynamicBatchingConfig,
    ModelConfig,
    RSModelConfig,
    SequencePackingConfig,
    TrainedModelConfig,
)
from aligner.config.roles.optim import OptimConfig, SchedConfig
from aligner.config.roles.peft import LoraConfig, PeftConfig
from aligner.config.roles.policy import BackendConfig
from aligner.config.roles.sampling import (
    CorrectionConfig,
    LengthParams,
    PolicyPPOConfig,
    RolloutConfig,
    SamplingOptions,
    SamplingParams,
)
from aligner.config.run import (
    BaseRunConfig,
    DistillRunConfig,
    DPORunConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    SamplingRunConfig,
    SFTRunConfig,
    SupervisedRunConfig,
)
from aligner.config.validation import ValidationConfig
