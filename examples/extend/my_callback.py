"""User-defined callbacks: ``trainer.callbacks=[examples/extend/my_callback.py:Journal]``.

python examples/train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu \
    'trainer.callbacks=[{callback: examples/extend/my_callback.py:StopWhenGood, kwargs: {at: 0.9}}]'

`aligner.algorithms.callbacks.Callback` describes the methods and their arguments.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.algorithms.callbacks import Callback, CallbackRun


class StopWhenGood(Callback):
    """Callback that ends the run when a validation metric reaches a threshold."""

    def __init__(self, at: float, metric: str = "val_rollouts/accuracy", patience: int = 1) -> None:
        """Set the threshold ``at``, to be reached in ``patience`` consecutive validations."""
        self.at, self.metric, self.patience = at, metric, patience
        self.times = 0

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Count the validations at the threshold, and stop the run."""
        self.times = self.times + 1 if metrics[self.metric] >= self.at else 0
        if self.times >= self.patience:
            run.stop(f"{self.metric} is {metrics[self.metric]:.2f}")

    def state_dict(self) -> dict[str, Any]:
        """Return the count, which a resumed run restores."""
        return {"times": self.times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self.times = state["times"]


class Journal(Callback):
    """Callback that writes a line to ``journal.jsonl`` in the run's directory for each event."""

    def on_run_start(self, run: CallbackRun, step: int) -> None:
        """Record that the run starts or resumes."""
        self._write(run, event="run_start", step=step, of=run.total_steps)

    def on_step_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Record the end of a step."""
        self._write(run, event="step_end", step=step, metrics=sorted(metrics))

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Record the end of a validation."""
        self._write(run, event="validation_end", step=step, metrics=sorted(metrics))

    def on_save(self, run: CallbackRun, step: int, path: Path) -> None:
        """Record that a run state is complete."""
        self._write(run, event="save", step=step, path=path.name, is_there=path.is_dir())

    def on_run_end(self, run: CallbackRun, step: int, reason: str) -> None:
        """Record the end of the run."""
        trained = [path.name for path in sorted(run.folder.glob("*.nemo"))]
        self._write(run, event="run_end", step=step, reason=reason, trained=trained)

    def _write(self, run: CallbackRun, **line: Any) -> None:
        with (run.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
