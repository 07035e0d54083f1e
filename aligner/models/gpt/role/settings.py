"""Settings of a role, read from a configuration: Hydra's, a mapping, or a dataclass."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from aligner.checkpoint.adapters import adapters_beside
from aligner.config import (
    LAYOUT_KEYS,
    CriticConfig,
    LayerOptions,
    LengthParams,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    ProcessConfig,
    SamplingParams,
    TrainedModelConfig,
    plain_mapping,
    section_of,
)
from aligner.config.roles.model import STAGE_KEYS
from aligner.config.translation.nemo_rl import PublishedRole
from aligner.errors import ConfigError

Precision = Literal["32", "bf16"]


@dataclass(frozen=True)
class RunSettings:
    """Settings that all roles of a run share."""

    precision: Precision = "32"
    gradient_clip_val: float = 1.0  # 0 turns clipping off
    non_finite: Literal["skip", "stop"] = "skip"
    non_finite_dir: Path | None = None  # for batches with a non-finite loss. None: not written
    seed: int = 1234
    cuda_graphs: bool = True  # of decoding steps, on GPUs
    max_optimizer_steps: int | None = None  # length of a schedule without max_steps

    @classmethod
    def of(cls, role: PublishedRole) -> "RunSettings":
        """Return the settings in ``role``, with defaults for those that it does not contain."""
        return cls(precision=role.precision, gradient_clip_val=role.gradient_clip_val)


@dataclass(frozen=True)
class RoleSettings(RunSettings):
    """Layout, precision, batch sizes and optimizer of one role.

    ``optim=None`` builds a role that cannot train and allocates no gradient buffers.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fp8: Literal["e4m3", "hybrid"] | None = None
    layers: LayerOptions = field(default_factory=LayerOptions)
    freeze_moe_router: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Literal["full", "selective"] | None = None
    dropout: float | None = None  # while training, None for the architecture's value
    micro_batch_size: int = 8
    global_batch_size: int = 64
    forward_micro_batch_size: int = 16
    length_params: LengthParams = field(default_factory=LengthParams)  # of responses
    sampling_params: SamplingParams = field(default_factory=SamplingParams)  # also of scoring
    rollout_micro_batch_size: int = 64  # sequences that are generated concurrently
    record_kept: int = 0  # maximum number of top-k and top-p candidates recorded for each token
    # Pack the sequences of a micro-batch into one row. auto: if the dtensor model can.
    sequence_packing: bool | Literal["auto"] = False
    sequence_length_round: int = 1  # multiple to which micro-batches are padded
    shared_prefixes: bool = True  # compute shared prefixes once
    optim: OptimConfig | None = None
    offload_adam_states: bool = False
    offload_gradients: bool = False
    attributes: tuple[str, ...] | None = None  # rated by a reward model, None for the file's
    lora: LoraConfig | None = None  # train only adapters and heads, None to train all weights
    adapters_path: str | None = None  # initial adapters, None for new ones
    trust_remote_code: bool = False  # of a Hugging Face directory

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer's weights."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def policy_settings(model: TrainedModelConfig, run: RunSettings) -> RoleSettings:
    """Return the policy's settings from its configuration section."""
    rollout = model.rollout
    return dataclasses.replace(
        _settings(model, model, run),
        length_params=rollout.length_params,
        sampling_params=rollout.sampling_params,
        rollout_micro_batch_size=rollout.rollout_micro_batch_size,
        record_kept=getattr(rollout, "record_kept_tokens", 0),
    )


def critic_settings(
    critic: CriticConfig, model: TrainedModelConfig, run: RunSettings
) -> RoleSettings:
    """Return the critic's settings. ``model``: policy, whose layout and adapters are defaults."""
    settings = _settings(critic, critic.with_layout(model), run)
    if critic.restore_from_path is None:
        return settings
    return dataclasses.replace(settings, adapters_path=None)


def reward_settings(
    model: TrainedModelConfig,
    run: RunSettings,
    attributes: tuple[str, ...] | None = None,
    learns: bool = True,
) -> RoleSettings:
    """Return a reward model's settings. ``learns``: False builds no optimizer."""
    settings = _settings(model, model, run)
    optim = settings.optim if learns else None
    return dataclasses.replace(settings, attributes=attributes, optim=optim)


def settings_to_continue(
    settings: RoleSettings, weights_path: str | None
) -> tuple[RoleSettings, str | None]:
    """Return settings and full-weights path of a role that continues from ``weights_path``.

    A role with adapters loads the adapters next to this path. Its frozen weights are those of the
    original model, and the returned path is None.
    """
    if weights_path is None or settings.lora is None:
        return settings, weights_path
    adapters_path = str(adapters_beside(weights_path))
    return dataclasses.replace(settings, adapters_path=adapters_path), None


def _settings(
    trained: TrainedModelConfig | CriticConfig, model: TrainedModelConfig, run: RunSettings
) -> RoleSettings:
    scoring = trained if isinstance(trained, CriticConfig) else trained.rollout
    return RoleSettings(
        **vars(run),
        # The model's section, which the roles share.
        parallel=model.parallel,
        fp8=model.fp8,
        layers=model.layers,
        freeze_moe_router=model.freeze_moe_router,
        overlap_grad_reduce=model.overlap_grad_reduce,
        overlap_param_gather=model.overlap_param_gather,
        recompute=model.activations_checkpoint_granularity,
        dropout=model.dropout,
        # Batch sizes of training and of scoring.
        micro_batch_size=trained.micro_batch_size,
        global_batch_size=trained.global_batch_size,
        forward_micro_batch_size=scoring.forward_micro_batch_size,
        sequence_packing=not model.dynamic_batching.enabled and model.sequence_packing.enabled,
        sequence_length_round=model.sequence_length_round,
        shared_prefixes=model.shared_prefixes,
        optim=trained.optim,
        offload_adam_states=scoring.offload_adam_states,
        offload_gradients=scoring.offload_gradients,
        lora=model.peft.lora,
        adapters_path=model.peft.restore_from_path,
        trust_remote_code=model.trust_remote_code,
    )


SectionConfig = TrainedModelConfig | CriticConfig
SectionType = type[TrainedModelConfig] | type[CriticConfig]
# Keys of a run's section that a constructor reads from ``model_config.yaml``. Other keys of a run
# (tokenizer, fp8, dropout) have another meaning in a `.nemo` file.
_RUN_KEYS = (
    *("micro_batch_size", "global_batch_size", "forward_micro_batch_size"),
    *(*LAYOUT_KEYS, *STAGE_KEYS, "freeze_moe_router"),
    *("sequence_packing", "dynamic_batching", "shared_prefixes"),
    *("activations_checkpoint_granularity", "offload_adam_states", "peft", "optim", "ppo", "rs"),
)


def run_section(
    cfg: SectionConfig | Mapping[str, Any], kinds: Sequence[SectionType], path: Any = None
) -> SectionConfig:
    """Parse a role's section of a run's configuration as one of the dataclasses ``kinds``.

    ``path`` replaces ``restore_from_path``. Raises `ConfigError` for invalid keys and values.
    """
    if isinstance(cfg, SectionConfig):
        return cfg
    if not isinstance(cfg, Mapping):
        raise ConfigError(
            f"cfg is {type(cfg).__name__}. Pass a role's section of a configuration (Hydra's, a "
            f"mapping, or {', '.join(kind.__name__ for kind in kinds)}), RoleSettings, or None"
        )
    values = plain_mapping(cfg)
    if path is not None:
        values["restore_from_path"] = str(path)
    return section_of(kinds, values)


def settings_of_section(config: SectionConfig, trainer: Any = None) -> RoleSettings:
    """Return the settings of a role outside of a run. ``trainer``: see `_run_settings`."""
    run = _run_settings(trainer)
    # A separate critic has no policy whose layout it could share.
    if isinstance(config, CriticConfig):
        body = TrainedModelConfig(restore_from_path=config.restore_from_path or "")
        return critic_settings(config, body, run)
    return policy_settings(config, run)


def settings_from_model_config(
    cfg: Mapping[str, Any], kinds: Sequence[SectionType], trainer: Any = None
) -> RoleSettings:
    """Read the settings that NeMo-Aligner merges into a ``model_config.yaml``.

    Without any of `_RUN_KEYS` the role cannot train and runs on one process.
    """
    present = plain_mapping(cfg, _RUN_KEYS)
    values = {key: value for key, value in present.items() if value is not None}
    run = _run_settings(trainer)
    # A plain `.nemo` file contains the architecture only.
    if not values:
        return RoleSettings(precision=run.precision)
    values["restore_from_path"] = "model_config.yaml"  # required, but not used
    config = section_of(kinds, values)
    settings = settings_of_section(config, trainer)
    return settings if "optim" in values else dataclasses.replace(settings, optim=None)


def _run_settings(trainer: Any) -> RunSettings:
    """Read precision and gradient clipping of a Lightning trainer, or use defaults for None."""
    precision = getattr(trainer, "precision", None)
    clip = getattr(trainer, "gradient_clip_val", None)
    run = RunSettings()
    if precision is not None:
        process = section_of((ProcessConfig,), {"precision": precision}, "trainer")
        run = dataclasses.replace(run, precision=process.precision)
    if clip is not None:
        run = dataclasses.replace(run, gradient_clip_val=float(clip))
    return run
