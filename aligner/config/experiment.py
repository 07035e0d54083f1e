"""Output of a run: directory, run states and logging."""

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
    """Project in W&B."""

    name: StrictStr | None = None
    """Name of the run in W&B. `null` means a generated name."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of Lightning's `WandbLogger`, such as `offline`."""


@dataclass(frozen=True)
class ExpManagerConfig:
    """Options of a run's directory, saved states and loggers."""

    explicit_log_dir: FilePath = "results/aligner"
    """Directory of all files of the run. The default is `results/` and the algorithm, such as
    `results/grpo` or `results/kto`. `{algorithm}` in the path is replaced by the algorithm's
    name."""

    resume_if_exists: StrictBool = True
    """Continue the run in the directory. `false` refuses a directory with a run."""

    start_anew: StrictBool = False
    """Start a new run in the directory. The earlier run is moved to `earlier_001/`. Leave the key
    out to continue the new run."""

    accept_changed: tuple[Literal["algorithm", "model", "data"], ...] = ()
    """Parts of a resumed run that may change: any of `algorithm`, `model` and `data`. See
    docs/ppo.md#resuming."""

    resume_changed: tuple[StrictStr, ...] = ()
    """Keys or sections of a resumed run that may change, such as `[model.ppo.ratio_eps]`."""

    save_last_k: Count = 2
    """Number of newest run states to keep."""

    async_save: StrictBool = True
    """Write run states in the background, from a copy in host memory (docs/checkpoints.md)."""

    save_top_k: Natural = 1
    """Number of best run states to keep in addition to the newest."""

    monitor: StrictStr | None = None
    """Metric that determines the best run state. `null` means `val_rollouts/accuracy`, or
    `val_rollouts/rewards` if a reward model or a server scores and no verifier is configured."""

    mode: Literal["max", "min"] = "max"
    """Whether the best value of the metric is the largest (`max`) or the smallest (`min`)."""

    create_tensorboard_logger: StrictBool = True
    """Write scalar metrics to `tensorboard/`."""

    create_wandb_logger: StrictBool = False
    """Log to W&B. Needs the extra `wandb`."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    samples_per_step: Count = 4
    """Samples per step in `samples.jsonl`. The console shows the samples of step 0, step 1 and
    every validation."""

    save_nemo: StrictBool = True
    """Write the trained policy as `policy.nemo` at the end."""

    @property
    def data_may_change(self) -> bool:
        """True if a resumed run may read other data, or the same data in another order."""
        sections = {key.partition(".")[0] for key in self.resume_changed}
        return bool(sections & {"data", "seed"}) or "data" in self.accept_changed

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if the directory is a file, and for keys that do not exist."""
        if os.path.exists(self.explicit_log_dir) and not os.path.isdir(self.explicit_log_dir):
            yield f"{key}.explicit_log_dir={self.explicit_log_dir} is a file. Give a directory"
        for name in self.resume_changed:
            section: Any = run
            # Keys below a null section or a mapping are not known in advance.
            for step in name.split("."):
                if section is None or isinstance(section, Mapping):
                    break
                if not hasattr(section, step):
                    yield (
                        f"{key}.resume_changed: {name!r} is not a key of the configuration. Use "
                        "the keys in the resumed run's error, or sections (trainer.ppo.reward)"
                    )
                    break
                section = getattr(section, step)
