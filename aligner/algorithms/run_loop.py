"""The life of a run: resume, validate, step, log, save, stop. The same for every algorithm.

::

    resume or validate (step 0)
    for each step:  learner.step → learner.validate when due → metrics line → run state when due
    at the end:     run state, trained .nemo, report

A step's line is written before its run state, so a restored step always has its line, and lines
of later steps are removed when the run resumes: what a killed run wrote after its last state is
computed again, to the bit.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from aligner.checkpoint.rng import capture_rng, restore_rng
from aligner.checkpoint.run_state import RunStateStore
from aligner.distributed import accelerator
from aligner.distributed.agreement import any_rank, from_rank_zero, is_rank_zero, on_rank_zero
from aligner.errors import ConfigError
from aligner.observe.metrics import MetricsWriter
from aligner.observe.nonfinite import training_step
from aligner.observe.progress import Progress
from aligner.observe.samples import Sample, SampleWriter, print_samples
from aligner.observe.timers import PhaseTimers


@dataclass(frozen=True)
class Outcome:
    """What a step or a validation tells: metrics under their full names, samples to show."""

    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)


class Learner(Protocol):
    """An algorithm, as the loop sees it."""

    @property
    def is_out_of_data(self) -> bool:
        """Whether no step can follow, although the schedule has some left."""
        ...

    def step(self, step: int, timers: PhaseTimers) -> Outcome:
        """Make step ``step`` (counted from 1)."""
        ...

    def validate(self, step: int, timers: PhaseTimers) -> Outcome:
        """Measure the policy as it stands after ``step``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Counters and positions, the same on every rank."""
        ...

    def save_roles(self, folder: Path) -> None:
        """Have the workers of every role write their shares below ``folder``."""
        ...

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Inverse of the two above, on any layout."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When things happen, in steps; 0 as an interval means only at the ends."""

    total_steps: int
    val_check_interval: int
    save_interval: int
    max_seconds: float | None = None

    def validates(self, step: int) -> bool:
        """Whether ``step`` is followed by a validation."""
        return step == self.total_steps or _due(step, self.val_check_interval)

    def saves(self, step: int) -> bool:
        """Whether ``step`` is followed by saving."""
        return step == self.total_steps or _due(step, self.save_interval)


@dataclass(frozen=True)
class Restoration:
    """The run state that a run continues from."""

    step: int
    path: Path
    changes: list[str]  # configuration keys that differ from the saved run's, in words
    saved_layout: str | None  # in words, where it is another than this run's; else None


class RunLoop:
    """Runs a learner to its end, or until it is told to stop."""

    def __init__(
        self,
        learner: Learner,
        schedule: Schedule,
        *,
        store: RunStateStore,
        metrics: MetricsWriter,
        samples: SampleWriter,
        console: Console,
        config: Mapping[str, Any],
        monitor: str,
        layout: str = "1 process",
        resume: bool = True,
    ) -> None:
        """What a run is made of.

        ``config``: the run's, kept in the run state. ``monitor``: metric that ranks states.
        ``layout``: number of processes and sizes of all parallel axes, in words.
        """
        self.learner, self.schedule, self.store = learner, schedule, store
        self.metrics, self.samples, self.console = metrics, samples, console
        self.config, self.monitor, self.layout, self._resume = config, monitor, layout, resume
        self._started = time.monotonic()

    def run(self, done: int | None) -> bool:
        """Run on from step ``done`` (None: a new run, which begins with a validation).

        True when the run came to its end (its last step, or ``max_time``), False when a signal
        stopped it before.
        """
        total = self.schedule.total_steps
        with (
            _stop_signal() as stopped,
            Progress(
                total, done_steps=done or 0, console=self.console, enabled=is_rank_zero()
            ) as progress,
        ):
            timers = PhaseTimers(synchronize=accelerator.synchronize, on_enter=progress.phase)
            if done is None:
                self._record(0, self.learner.validate(0, timers), timers, progress)
            for step in range((done or 0) + 1, total + 1):
                if self.learner.is_out_of_data:
                    self._say_out_of_data(step - 1)
                    break
                with training_step(step):
                    outcome = self.learner.step(step, timers)
                interrupted = any_rank(stopped.is_set())
                out_of_time = from_rank_zero(self._out_of_time())
                is_last = step == total or self.learner.is_out_of_data
                # Not after a signal: the resumed run must write what an uninterrupted one does.
                if is_last or self.schedule.validates(step) or (out_of_time and not interrupted):
                    outcome = _joined(outcome, self.learner.validate(step, timers))
                written = self._record(step, outcome, timers, progress)
                if is_last or self.schedule.saves(step) or interrupted or out_of_time:
                    self._save(step, written)
                if (interrupted or out_of_time) and not is_last:
                    self._say_stopped(step, "a signal" if interrupted else "trainer.max_time")
                    return not interrupted
        return True

    def restore(self) -> Restoration | None:
        """Continue from the newest run state, if there is one.

        What was written after that state is removed; without one, everything is. Random states
        belong to a process: workers restore their own (`worker_state`), this one rank 0's.
        """
        path = self.store.latest()
        if path is not None and not self._resume:
            raise ConfigError(
                f"exp_manager.resume_if_exists=false, but {path.parent} holds a run (newest: "
                f"{path.name}); set it to true, or give another exp_manager.explicit_log_dir"
            )
        restored = None
        if path is not None:
            saved = self.store.load(path)
            self.learner.load(saved.state["learner"], path)
            saved_layout = saved.state["layout"]
            if saved_layout == self.layout and is_rank_zero():
                restore_rng(saved.state["rng"], accelerator.set_rng_state)
            restored = Restoration(
                saved.step,
                path,
                config_changes(saved.state["config"], self.config),
                None if saved_layout == self.layout else saved_layout,
            )
        last = -1 if restored is None else restored.step
        on_rank_zero(lambda: self.metrics.truncate_after(last))
        on_rank_zero(lambda: self.samples.truncate_after(last))
        return restored

    def _record(
        self, step: int, outcome: Outcome, timers: PhaseTimers, progress: Progress
    ) -> dict[str, float]:
        metrics = {**outcome.metrics, **timers.flush()}
        # A full disk is rank 0's trouble first; the others must not wait for it in the next step.
        on_rank_zero(lambda: self.metrics.write(step, metrics))
        on_rank_zero(lambda: self.samples.write(outcome.samples))
        progress.step(step, metrics)
        if is_rank_zero() and (step <= 1 or self.schedule.validates(step)):
            print_samples(outcome.samples, self.console)  # samples.jsonl has those of every step
        return metrics

    def _save(self, step: int, metrics: Mapping[str, float]) -> None:
        self.store.save(
            step,
            {
                "learner": self.learner.state_dict(),
                "config": dict(self.config),
                "layout": self.layout,
                "rng": capture_rng(accelerator.rng_state),
            },
            metric=metrics.get(self.monitor),
            write=self.learner.save_roles,
        )

    def _out_of_time(self) -> bool:
        limit = self.schedule.max_seconds
        return limit is not None and time.monotonic() - self._started >= limit

    def _say_out_of_data(self, step: int) -> None:
        if is_rank_zero():
            self.console.print(
                f"max_epochs is reached after step {step} of at most {self.schedule.total_steps}",
                highlight=False,
            )

    def _say_stopped(self, step: int, reason: str) -> None:
        if is_rank_zero():
            self.console.print(
                f"stopped by {reason} after step {step} of {self.schedule.total_steps}; the run "
                "state is saved and the same command continues",
                highlight=False,
            )


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; a second SIGTERM ends the process as it would without us."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # only the main thread may handle signals
        return
    previous = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(signal.SIGTERM, previous)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGTERM, previous)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _joined(first: Outcome, second: Outcome) -> Outcome:
    return Outcome({**first.metrics, **second.metrics}, [*first.samples, *second.samples])


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every leaf that differs."""
    old, new = _flat(before), _flat(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted key."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves
