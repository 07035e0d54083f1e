"""Settings of a role, in one small typed value.

They are made from what a user has: hydra's section, a mapping, or a dataclass of ours.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from aligner.checkpoint.adapters import adapters_beside
from aligner.compat.nemo_rl import PublishedRole
from aligner.config import (
    LAYOUT_KEYS,
    CriticConfig,
    LayerOptions,
    LengthParams,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    ProcessConfig,
    RolloutConfig,
    SamplingParams,
    TrainedModelConfig,
    plain_mapping,
    section_of,
)
from aligner.config.roles.model import STAGE_KEYS
from aligner.errors import ConfigError

Precision = Literal["32", "bf16"]


@dataclass(frozen=True)
class RoleSettings:
    """Layout, precision, batch sizes and optimizer of one role.

    ``optim=None`` builds a role that cannot train (and holds no gradient buffers).
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: Precision = "32"
    fp8: Literal["e4m3", "hybrid"] | None = None
    layers: LayerOptions = field(default_factory=LayerOptions)
    freeze_moe_router: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Literal["full", "selective"] | None = None
    dropout: float | None = None  # while training; None: the architecture's own
    micro_batch_size: int = 8
    global_batch_size: int = 64
    forward_micro_batch_size: int = 16
    length_params: LengthParams = field(default_factory=LengthParams)  # of responses
    sampling_params: SamplingParams = field(default_factory=SamplingParams)  # temperature: scores'
    rollout_micro_batch_size: int = 64  # sequences in flight together while generating
    record_kept: int = 0  # most tokens kept by a filter that are recorded with each sampled one
    cuda_graphs: bool = True  # of decoding steps, on GPUs
    sequence_packing: bool = False  # the sequences of a micro-batch stand in one row
    sequence_length_round: int = 1  # padded micro-batches are as long as a multiple of it
    shared_prefixes: bool = True  # what sequences begin with in common goes through once
    optim: OptimConfig | None = None
    max_optimizer_steps: int | None = None  # what a schedule without max_steps decays over
    gradient_clip_val: float = 1.0  # 0: off
    offload_adam_states: bool = False
    offload_gradients: bool = False
    non_finite: Literal["skip", "stop"] = "skip"
    non_finite_dir: Path | None = None  # where offending batches are written; None: nowhere
    seed: int = 1234
    attributes: tuple[str, ...] | None = None  # that a reward model rates; None: as in its file
    lora: LoraConfig | None = None  # adapters, and heads, are all that is trained; None: all is
    adapters_path: str | None = None  # adapters to begin with; None: fresh ones

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer's weights."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class RunSettings:
    """Settings that both roles of a run share and neither role's config section holds."""

    precision: Precision = "32"
    gradient_clip_val: float = 1.0
    non_finite: Literal["skip", "stop"] = "skip"
    non_finite_dir: Path | None = None
    seed: int = 1234
    cuda_graphs: bool = True

    @classmethod
    def of(cls, role: PublishedRole) -> "RunSettings":
        """Read them from a published mapping; the rest are the defaults."""
        return cls(precision=role.precision, gradient_clip_val=role.gradient_clip_val)


def policy_settings(
    model: TrainedModelConfig, run: RunSettings, max_optimizer_steps: int | None = None
) -> RoleSettings:
    """Settings of the actor."""
    rollout = model.rollout
    return dataclasses.replace(
        _settings(model, rollout, model, run, max_optimizer_steps),
        length_params=rollout.length_params,
        sampling_params=rollout.sampling_params,
        rollout_micro_batch_size=rollout.rollout_micro_batch_size,
        record_kept=getattr(rollout, "record_kept_tokens", 0),
        cuda_graphs=run.cuda_graphs,
    )


def critic_settings(
    critic: CriticConfig,
    model: TrainedModelConfig,
    run: RunSettings,
    max_optimizer_steps: int | None = None,
) -> RoleSettings:
    """Settings of the critic: the policy's layout unless it has its own, adapters where it has.

    It begins with the policy's adapters where it begins with the policy's weights.
    """
    settings = _settings(critic, critic, critic.with_layout(model), run, max_optimizer_steps)
    if critic.restore_from_path is None:
        return settings
    return dataclasses.replace(settings, adapters_path=None)


def reward_settings(
    model: TrainedModelConfig,
    run: RunSettings,
    attributes: tuple[str, ...] | None = None,
    learns: bool = True,
    max_optimizer_steps: int | None = None,
) -> RoleSettings:
    """Settings of a reward model; ``attributes``: see `RoleSettings`."""
    settings = _settings(model, model.rollout, model, run, max_optimizer_steps)
    optim = settings.optim if learns else None
    return dataclasses.replace(settings, attributes=attributes, optim=optim)


def continuing(settings: RoleSettings, weights_path: str | None) -> tuple[RoleSettings, str | None]:
    """Settings and whole weights with which a role continues from ``weights_path``.

    With adapters it begins with its frozen weights, and loads the adapters that stand beside.
    """
    if weights_path is None or settings.lora is None:
        return settings, weights_path
    beside = str(adapters_beside(weights_path))
    return dataclasses.replace(settings, adapters_path=beside), None


def _settings(
    trained: TrainedModelConfig | CriticConfig,
    scoring: RolloutConfig | CriticConfig,
    model: TrainedModelConfig,
    run: RunSettings,
    max_optimizer_steps: int | None,
) -> RoleSettings:
    """Settings of training and scoring of a role, each from its section; the rest is shared."""
    return RoleSettings(
        parallel=model.parallel,
        precision=run.precision,
        fp8=model.fp8,
        layers=model.layers,
        freeze_moe_router=model.freeze_moe_router,
        overlap_grad_reduce=model.overlap_grad_reduce,
        overlap_param_gather=model.overlap_param_gather,
        recompute=model.activations_checkpoint_granularity,
        dropout=model.dropout,
        micro_batch_size=trained.micro_batch_size,
        global_batch_size=trained.global_batch_size,
        forward_micro_batch_size=scoring.forward_micro_batch_size,
        sequence_packing=model.sequence_packing.enabled,
        sequence_length_round=model.sequence_length_round,
        shared_prefixes=model.shared_prefixes,
        optim=trained.optim,
        max_optimizer_steps=max_optimizer_steps,
        gradient_clip_val=run.gradient_clip_val,
        offload_adam_states=scoring.offload_adam_states,
        offload_gradients=scoring.offload_gradients,
        non_finite=run.non_finite,
        non_finite_dir=run.non_finite_dir,
        seed=run.seed,
        lora=model.peft.lora,
        adapters_path=model.peft.restore_from_path,
    )


SectionConfig = TrainedModelConfig | CriticConfig
SectionType = type[TrainedModelConfig] | type[CriticConfig]
# Keys of a run's section that a constructor honours beside the architecture's; a `.nemo` file's
# configuration has others of these names (tokenizer, fp8, dropout) with another meaning.
_HONOURED = (
    "micro_batch_size",
    "global_batch_size",
    "forward_micro_batch_size",
    *LAYOUT_KEYS,
    *STAGE_KEYS,
    "freeze_moe_router",
    "sequence_packing",
    "dynamic_batching",
    "shared_prefixes",
    "activations_checkpoint_granularity",
    "offload_adam_states",
    "peft",
    "optim",
    "ppo",
    "rs",
)


def run_section(
    cfg: SectionConfig | Mapping[str, Any], kinds: Sequence[SectionType], path: Any = None
) -> SectionConfig:
    """``cfg`` as a section of a run's configuration, one of ``kinds``.

    ``path`` stands for ``restore_from_path`` where it is given. `ConfigError` names what does not
    fit.
    """
    if isinstance(cfg, SectionConfig):
        return cfg
    if not isinstance(cfg, Mapping):
        raise ConfigError(
            f"cfg is {type(cfg).__name__}; give a run's section (hydra's, a mapping, or "
            f"{', '.join(kind.__name__ for kind in kinds)}), RoleSettings, or None"
        )
    values = plain_mapping(cfg)
    if path is not None:
        values["restore_from_path"] = str(path)
    return section_of(kinds, values)


def settings_of_section(config: SectionConfig, trainer: Any = None) -> RoleSettings:
    """Settings of a role of its own; precision and clipping are the Lightning trainer's."""
    run = _run_settings(trainer)
    if isinstance(config, CriticConfig):
        body = TrainedModelConfig(restore_from_path=config.restore_from_path or "")
        return critic_settings(config, body, run)
    return policy_settings(config, run)


def settings_beside_architecture(
    cfg: Mapping[str, Any], kinds: Sequence[SectionType], trainer: Any = None
) -> RoleSettings:
    """Settings that stand in a ``model_config.yaml``, as NeMo-Aligner merges them into it.

    Read are batch sizes, layout, ``optim``, ``peft`` and the sections ``ppo`` and ``rs`` of a run;
    without any of them the role cannot train and runs on one process.
    """
    given = plain_mapping(cfg, _HONOURED)
    values = {key: value for key, value in given.items() if value is not None}
    run = _run_settings(trainer)
    if not values:
        return RoleSettings(precision=run.precision)
    values["restore_from_path"] = "model_config.yaml"  # unread: weights come from elsewhere
    config = section_of(kinds, values)
    settings = settings_of_section(config, trainer)
    return settings if "optim" in values else dataclasses.replace(settings, optim=None)


def _run_settings(trainer: Any) -> RunSettings:
    """Read a Lightning trainer's precision and clipping; our defaults where it has none."""
    precision = getattr(trainer, "precision", None)
    clip = getattr(trainer, "gradient_clip_val", None)
    run = RunSettings()
    if precision is not None:
        chosen = section_of((ProcessConfig,), {"precision": precision}, "trainer").precision
        run = dataclasses.replace(run, precision=chosen)
    if clip is not None:
        run = dataclasses.replace(run, gradient_clip_val=float(clip))
    return run
