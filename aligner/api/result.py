"""`Result`: the metrics, files and models of a training run."""

import os
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.api.quiet import quiet
from aligner.errors import CheckpointNotFoundError, ConfigError, MissingPackageError, raised_as

if TYPE_CHECKING:
    import pandas as pd

    from aligner.api.model import CriticModel, Model


class Result:
    """The metrics, files and models of a training run. Models are loaded at the first use.

    A result can be the ``model`` of another training function, as ``os.fspath(result)`` is the
    path of the trained model. ``command``: the equivalent command line.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self.folder = folder
        self.command = command

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics, one dict per step, oldest first: ``step`` and a number per metric."""
        from aligner.observe.metrics import read_metrics

        steps: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.folder / "metrics.jsonl"):
            steps.setdefault(line["step"], {}).update(line)
        return list(steps.values())

    def to_pandas(self) -> "pd.DataFrame":
        """Return `metrics` as a table, with a row per step. Raises `ConfigError` without steps."""
        remedy = "Run: pip install pandas"
        with raised_as(MissingPackageError, "Result.to_pandas()", ImportError, remedy=remedy):
            import pandas as pd
        if not self.metrics:
            raise ConfigError(f"{self.folder} has no metrics, as the run made no step. Train again")
        return pd.DataFrame(self.metrics).set_index("step")

    @property
    def best(self) -> dict[str, Any]:
        """The saved state with the best monitored metric: ``step``, ``metric`` and ``path``.

        ``metric`` is None, and the state the newest, if the run had no validation. Raises
        `CheckpointNotFoundError` if the run has no state.
        """
        from aligner.checkpoint.run_state.store import RunStateStore

        store = RunStateStore(self.folder / "run_state")
        states = store.states()
        if not states:
            raise CheckpointNotFoundError(f"{self.folder}: the run has not saved a state")
        config = store.load(states[-1].path).state["config"]
        sign = -1 if config["exp_manager"]["mode"] == "min" else 1
        scored = [state for state in states if state.metric is not None] or states[-1:]
        state = max(scored, key=lambda state: (sign * (state.metric or 0.0), state.step))
        return {"step": state.step, "metric": state.metric, "path": state.path}

    @property
    def report(self) -> Path:
        """Path of the run's HTML report."""
        return self.folder / "report.html"

    @cached_property
    def policy(self) -> "Model":
        """The trained model."""
        with quiet():
            from aligner.api.model import load_model

        return load_model(self.folder)

    @cached_property
    def value(self) -> "CriticModel | None":
        """The trained critic of a PPO run. None for algorithms without a critic."""
        with quiet():
            from aligner.api.model import load_critic

        return load_critic(self.folder)

    def generate(self, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Generate one response for each prompt. See `Model.generate`."""
        return self.policy.generate(prompts, **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a ``.nemo`` file if ``path`` ends in ``.nemo``, else a Hugging Face directory.

        Returns ``path``. Raises `CheckpointNotFoundError` if the run was stopped before its end,
        and `ConfigError` if ``path`` exists or the model cannot be a ``.nemo`` file.
        """
        with quiet():
            from aligner.api.model import new_path
            from aligner.checkpoint.convert import nemo_to_hf

        source = Path(os.fspath(self))
        target = new_path(path, has_nemo_form=not source.is_dir())
        if source.is_dir():  # a model without a .nemo form
            shutil.copytree(source, target)
        elif target.suffix == ".nemo":
            shutil.copyfile(source, target)
        else:
            nemo_to_hf(source, target)
        return target

    def __fspath__(self) -> str:
        """Return the path of the trained model. Raises `CheckpointNotFoundError` without one."""
        for name in ("policy.nemo", "reward_model.nemo", "policy", "reward_model"):
            if (path := self.folder / name).exists():
                return str(path)
        raise CheckpointNotFoundError(
            f"{self.folder}: the trained model is missing, because the run was stopped early or "
            "exp_manager.save_nemo=false. Call the training function again, with "
            "overrides={'exp_manager.save_nemo': True}"
        )

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}, {len(self.metrics)} steps)"
