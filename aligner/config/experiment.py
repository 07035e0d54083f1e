"""Outputs of a run: directories, logging, checkpoints and their limits."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import StrictBool, StrictStr

from aligner.config.fields import Count, FilePath, Natural


@dataclass(frozen=True)
class WandbConfig:
    """Arguments of Lightning's W&B logger."""

    project: StrictStr = "aligner"
    """W&B's project."""

    name: StrictStr | None = None
    """W&B's name of the run. `null` means W&B invents one."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of Lightning's `WandbLogger`, e.g. `offline`."""


@dataclass(frozen=True)
class ExpManagerConfig:
    """Directory, checkpoints and loggers."""

    explicit_log_dir: FilePath = "results/aligner"
    """Everything of the run is below it.

    Each script has a default of its own: `results/ppo`, `results/rs`, `results/sft`,
    `results/reward`, `results/distill`; without a critic the algorithm's (`results/grpo`,
    `results/gspo`), of preferences the loss's (`results/dpo`, `results/kto`). `{algorithm}` in it
    stands for the algorithm's name.
    """

    resume_if_exists: StrictBool = True
    """Continue the run there. `false` means refuse a directory that holds one."""

    start_anew: StrictBool = False
    """Begin a new run there; the earlier one moves into `earlier_001/` and so on.

    Nothing is deleted. Such a command begins anew whenever it is started: leave the key out to
    continue.
    """

    accept_changed: tuple[Literal["algorithm", "model", "data"], ...] = ()
    """May be another than the saved run's; else another is refused.

    Any of `algorithm`, `model` and `data`.
    """

    resume_changed: tuple[StrictStr, ...] = ()
    """Keys, or sections, of the run's identity that may differ from the saved run's.

    Such as `[model.ppo.ratio_eps]`; every other one that differs is refused (docs/ppo.md#resuming).
    """

    save_last_k: Count = 2
    """Newest run states kept.

    If the last one turns out to be damaged, the run goes on from the one before.
    """

    async_save: StrictBool = True
    """Write run states while the next steps are made, from a copy in host memory.

    Its size is in the start-up report. Where there is no memory for a copy, and with `false`, a
    step with a save waits for the disk.
    """

    save_top_k: Natural = 1
    """Best run states kept besides the newest."""

    monitor: StrictStr | None = None
    """Metric that says which run state is best.

    null: `val_rollouts/accuracy`, or `val_rollouts/rewards` where a reward model or a server scores
    and no verifier looks on.
    """

    mode: Literal["max", "min"] = "max"
    """`max` or `min`: whether more of it is better."""

    create_tensorboard_logger: StrictBool = True
    """Write scalars to `tensorboard/`."""

    create_wandb_logger: StrictBool = False
    """Log to W&B, which needs the extra `wandb`."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    samples_per_step: Count = 4
    """Samples written to `samples.jsonl` each step.

    The console shows those of step 0, step 1 and every validation.
    """

    save_nemo: StrictBool = True
    """Write the trained policy as `policy.nemo` at the end."""

    @property
    def data_may_change(self) -> bool:
        """True if a resumed run may read other data, or the same data in another order."""
        sections = {key.partition(".")[0] for key in self.resume_changed}
        return bool(sections & {"data", "seed"}) or "data" in self.accept_changed

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a directory that is a file, and keys that the configuration does not have."""
        if os.path.exists(self.explicit_log_dir) and not os.path.isdir(self.explicit_log_dir):
            yield f"{key}.explicit_log_dir={self.explicit_log_dir}: is a file. Give a directory"
        for name in self.resume_changed:
            section: Any = run
            for step in name.split("."):
                if section is None or isinstance(section, Mapping):
                    break
                if not hasattr(section, step):
                    yield (
                        f"{key}.resume_changed: {name!r} is no key of the configuration. Give the "
                        "keys that the refusal names, or sections such as trainer.ppo.reward"
                    )
                    break
                section = getattr(section, step)
