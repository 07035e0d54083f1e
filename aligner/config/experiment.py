"""Backends, and what a run leaves behind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.config.fields import Count, Natural


@dataclass(frozen=True)
class WandbConfig:
    """Arguments of Lightning's W&B logger."""

    project: str = "aligner"
    name: str | None = None  # null: W&B invents one
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # any further ones


@dataclass(frozen=True)
class ExpManagerConfig:
    """Directory, checkpoints and loggers."""

    explicit_log_dir: str = "results/aligner"  # everything of the run is below it
    resume_if_exists: bool = True  # continue from the newest run state there
    save_top_k: Natural = 1  # best run states kept besides the newest
    monitor: str = "val_rollouts/accuracy"  # metric that says which is best
    mode: Literal["max", "min"] = "max"  # whether more of it is better
    create_tensorboard_logger: bool = True
    create_wandb_logger: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
    samples_per_step: Count = 4  # samples shown and written to samples.jsonl each step
    save_nemo: bool = True  # write the trained policy as a .nemo at the end
