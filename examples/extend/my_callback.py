"""Callbacks of one's own, by path: ``trainer.callbacks=[examples/extend/my_callback.py:Journal]``.

python examples/train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu \
    'trainer.callbacks=[{callback: examples/extend/my_callback.py:StopWhenGood, kwargs: {at: 0.9}}]'

What is called, and with what: `aligner.algorithms.callbacks.Callback`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.algorithms.callbacks import Callback, CallbackRun


class StopWhenGood(Callback):
    """Ends the run once a metric of the validation has been high enough so many times in a row."""

    def __init__(self, at: float, metric: str = "val_rollouts/accuracy", patience: int = 1) -> None:
        """``at``: high enough; ``patience``: times in a row."""
        self.at, self.metric, self.patience = at, metric, patience
        self.times = 0

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Count, and stop."""
        self.times = self.times + 1 if metrics[self.metric] >= self.at else 0
        if self.times >= self.patience:
            run.stop(f"{self.metric} is {metrics[self.metric]:.2f}")

    def state_dict(self) -> dict[str, Any]:
        """The count goes on where the run does."""
        return {"times": self.times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.times = state["times"]


class Journal(Callback):
    """Writes a line of ``journal.jsonl`` in the run's directory for all that it is told."""

    def on_run_start(self, run: CallbackRun, step: int) -> None:
        """A run begins, or goes on."""
        self._write(run, event="run_start", step=step, of=run.total_steps)

    def on_step_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """A step is made."""
        self._write(run, event="step_end", step=step, metrics=sorted(metrics))

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """The model was validated."""
        self._write(run, event="validation_end", step=step, metrics=sorted(metrics))

    def on_save(self, run: CallbackRun, step: int, path: Path) -> None:
        """A run state is complete."""
        self._write(run, event="save", step=step, path=path.name, is_there=path.is_dir())

    def on_run_end(self, run: CallbackRun, step: int, reason: str) -> None:
        """The run is over."""
        trained = [path.name for path in sorted(run.folder.glob("*.nemo"))]
        self._write(run, event="run_end", step=step, reason=reason, trained=trained)

    def _write(self, run: CallbackRun, **line: Any) -> None:
        with (run.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
