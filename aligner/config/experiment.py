"""Outputs of a run: directories, logging, checkpoints and their limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.config.fields import Count, FilePath, Natural


@dataclass(frozen=True)
class WandbConfig:
    """Arguments of Lightning's W&B logger."""

    project: str = "aligner"
    name: str | None = None  # null: W&B invents one
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # any further ones


@dataclass(frozen=True)
class ExpManagerConfig:
    """Directory, checkpoints and loggers."""

    explicit_log_dir: FilePath = "results/aligner"  # everything of the run is below it
    resume_if_exists: bool = True  # continue the run there; false: refuse a directory with one
    # Begin a new run there: what the earlier one left moves into earlier_001/ and so on. Such a
    # command begins anew whenever it is started: leave it out to continue.
    start_anew: bool = False
    # What may be another than the saved run's when it is continued; else another is refused.
    accept_changed: tuple[Literal["algorithm", "model", "data"], ...] = ()
    save_last_k: Count = 2  # newest run states kept: if the last is damaged, the one before is used
    # Write run states while the next steps are made, from a copy in host memory; where there is no
    # memory for one, and with false, a step with a save waits for the disk.
    async_save: bool = True
    save_top_k: Natural = 1  # best run states kept besides the newest
    # Metric that says which is best; null: val_rollouts/accuracy, or where a reward model or a
    # server scores and no verifier looks on, val_rollouts/rewards.
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"  # whether more of it is better
    create_tensorboard_logger: bool = True
    create_wandb_logger: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
    samples_per_step: Count = 4  # samples shown and written to samples.jsonl each step
    save_nemo: bool = True  # write the trained policy as a .nemo at the end
