"""A role's settings out of what a user has: hydra's section, a mapping, or a dataclass of ours."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.config import (
    LAYOUT_KEYS,
    CriticConfig,
    ProcessConfig,
    TrainedModelConfig,
    plain_mapping,
    section_of,
)
from aligner.errors import ConfigError
from aligner.models.gpt.role.settings import (
    RoleSettings,
    RunSettings,
    critic_settings,
    policy_settings,
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
    "sequence_packing",
    "dynamic_batching",
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
