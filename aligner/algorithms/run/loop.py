"""The loop of a run: resume, validate, train, log, save and stop, for all algorithms.

The metrics of a step are written before its run state, so the logs contain every restored step.
When a run resumes, later steps are removed from the logs and computed again.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.run.directory import config_changes
from aligner.algorithms.run.stopping import stop_signal
from aligner.checkpoint.background import stop_all_tasks
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.tree import capture_rng, restore_rng
from aligner.config.parse import without_new_defaults
from aligner.data.batches import PromptSampler
from aligner.data.tokenizers.tokenizer import TEMPLATE_TIME
from aligner.device import accelerator
from aligner.errors import (
    CheckpointError,
    DamagedStateError,
    NonFiniteError,
    raised_as,
    training_step,
)
from aligner.models.handle import RoleHandle
from aligner.observe.metrics import MetricsWriter, PhaseTimers, Sample
from aligner.observe.progress import ConsoleProgress, sample_table
from aligner.parallel.collectives import from_rank_zero, gather_objects, is_rank_zero, on_rank_zero


@dataclass(frozen=True)
class StepResult:
    """Metrics and samples of a training step or a validation."""

    metrics: dict[str, float]  # by full name
    samples: list[Sample] = field(default_factory=list)  # for display
    idle_roles: tuple[str, ...] = ()  # models whose updates were all skipped (NaN or infinity)
    warnings: tuple[str, ...] = ()  # for the console


class Learner(ABC):
    """Base class of trainers. `RunLoop` calls the methods, and saves the result of `state_dict`."""

    counters: ClassVar[tuple[str, ...]] = ("consumed_samples", "updates")  # saved attributes
    roles: Mapping[str, RoleHandle]  # models by folder in a run state, the trained model first
    sampler: PromptSampler  # draws the data of a step

    @property
    def is_out_of_data(self) -> bool:
        """Whether the data ended before the last scheduled step."""
        return False

    @property
    def trained_role(self) -> RoleHandle:
        """The model that the run trains and finally writes to a file."""
        return next(iter(self.roles.values()))

    @abstractmethod
    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """Execute training step number ``step``. The first step is 1."""

    @abstractmethod
    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Compute validation metrics after ``step``."""

    def save_model(self, path: str) -> None:
        """Write the trained model to ``path``."""
        self.trained_role.save_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and data position. The result must be equal on all ranks."""
        counters = {name: getattr(self, name) for name in self.counters}
        return {**counters, "sampler": self.sampler.state_dict()}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore ``state``, a result of `state_dict`, and load the models from ``folder``."""
        for name in self.counters:
            setattr(self, name, state[name])
        self.sampler.load_state_dict(state["sampler"])
        for name, role in self.roles.items():
            role.load_state(folder / name)


@dataclass(frozen=True)
class Schedule:
    """Steps at which a run validates, saves and ends. Interval 0 selects the last step only."""

    total_steps: int
    val_check_interval: int
    save_interval: int
    max_seconds: float | None = None
    max_skipped_steps: int = 5  # number of consecutive steps without an update that end the run
    async_save: bool = False  # write run states while later steps are computed

    def validates(self, step: int) -> bool:
        """Return whether ``step`` is followed by a validation."""
        return self._is_due(step, self.val_check_interval)

    @property
    def saves_in_background(self) -> bool:
        """Whether run states are written while later steps are computed."""
        return self.async_save and 0 < self.save_interval < self.total_steps

    def saves(self, step: int) -> bool:
        """Return whether a run state is saved after ``step``."""
        return self._is_due(step, self.save_interval)

    def _is_due(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)


@dataclass(frozen=True)
class Restoration:
    """Restored run state, and its differences from the current run."""

    step: int
    path: Path
    changes: list[str]  # ``key: old -> new`` for each changed configuration key
    saved_layout: str | None  # description of the saved parallel layout if it differs, else None


@dataclass(eq=False)
class RunLoop:
    """Loop of a run: validate, train, log and save, until the last step, a signal or a limit."""

    learner: Learner
    schedule: Schedule
    _: KW_ONLY
    store: RunStateStore
    metrics: MetricsWriter
    console: Console
    config: Mapping[str, Any]  # run states contain ``config`` and ``identity``
    monitor: str  # metric by which the best run states are kept
    layout: str = "1 process"  # number of processes and sizes of all parallel axes
    identity: Mapping[str, Any] = field(default_factory=dict)
    on_saved: Callable[[], None] = lambda: None  # called on rank 0 after every run state
    callbacks: Callbacks = field(default_factory=Callbacks)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # default of each configuration key

    def __post_init__(self) -> None:
        self.step = 0  # the last finished step
        self.resumed_step: int | None = None  # step of the restored run state
        self.interrupted = False  # True after a signal stopped the run
        self.ended_by = ""  # reason why the run ended
        self._unannounced: int | None = None  # step of a run state unknown to callbacks
        self._started = time.monotonic()
        self._idle_steps = 0  # number of consecutive steps without an update

    def run(self) -> None:
        """Run the remaining steps. A new run begins with a validation."""
        total, resumed_step = self.schedule.total_steps, self.resumed_step or 0
        with (
            self._running(),
            training_step(resumed_step) as current_step,
            stop_signal(is_rank_zero()) as stopped,
            ConsoleProgress(
                total, done_steps=resumed_step, console=self.console, enabled=is_rank_zero()
            ) as progress,
        ):
            timers = PhaseTimers(synchronize=accelerator.synchronize, on_enter=progress.phase)
            if self.resumed_step is None:
                self._record(0, self._validate(0, timers), timers, progress)
            for step in range(resumed_step + 1, total + 1):
                if self.learner.is_out_of_data:
                    self.ended_by = "max_epochs is reached"
                    self._say(f"{self.ended_by} after step {step - 1} of at most {total}")
                    break
                # Train.
                current_step.set(step)
                result = self.learner.step(step, timers)
                self.step = step
                self.callbacks.notify("on_step_end", step, result.metrics)
                # All ranks must agree on whether the run ends after this step.
                interrupted = any(gather_objects(stopped.name is not None))
                seconds, limit = time.monotonic() - self._started, self.schedule.max_seconds
                out_of_time = from_rank_zero(limit is not None and seconds >= limit)
                is_last = step == total or self.learner.is_out_of_data
                is_stopped = out_of_time or self.callbacks.stop_reason is not None
                # Validate, but not after a signal: resumed and uninterrupted runs have equal logs.
                if is_last or self.schedule.validates(step) or (is_stopped and not interrupted):
                    validation = self._validate(step, timers)
                    samples = [*result.samples, *validation.samples]
                    metrics = {**result.metrics, **validation.metrics}
                    result = replace(result, metrics=metrics, samples=samples)
                # Write the metrics, and a run state if it is due. A callback may stop the run.
                written = self._record(step, result, timers, progress)
                steps_made = step - resumed_step if is_last else None
                self._check_learning(step, result.idle_roles, steps_made)
                is_stopped = is_stopped or self.callbacks.stop_reason is not None
                is_end = is_last or interrupted or is_stopped
                self._save_when_due(step, written, timers, is_end)
                # Name the reason of an early end.
                if (interrupted or is_stopped) and not is_last:
                    self.interrupted = interrupted
                    self.ended_by = f"a callback: {self.callbacks.stop_reason}"
                    if interrupted:
                        self.ended_by = stopped.name or "a signal"
                    elif out_of_time:
                        self.ended_by = "trainer.max_time"
                    self._say(
                        f"stopped by {self.ended_by} after step {step} of {total}. The run state "
                        f"{self.store.path(step)} is saved, and the same command continues"
                    )
                    return
            self.store.finish()
            self._announce()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Notify callbacks of the start. If the block raises, complete or stop a pending save."""
        try:
            self.step, self.ended_by = self.resumed_step or 0, "the last step is made"
            self.callbacks.notify("on_run_start", self.step)
            yield
        except Exception:
            self.store.drain()
            raise
        except BaseException:  # a second Ctrl-C
            stop_all_tasks()
            raise

    def _save_when_due(
        self, step: int, written: Mapping[str, float], timers: PhaseTimers, is_end: bool
    ) -> None:
        """Save a run state if it is due. Otherwise raise the error of a background save, if any."""
        if is_end or self.schedule.saves(step):
            with timers("save"):
                self._save(step, written, self.schedule.async_save and not is_end)
        elif self._unannounced is not None:
            with timers("save"):
                self.store.check()
            self._announce()
        elif step == (self.resumed_step or 0) + 1 and self.schedule.saves_in_background:
            # The first step has created the optimizer's state: reserve memory for its copy.
            for role in self.learner.roles.values():
                role.prepare_saving()

    def _validate(self, step: int, timers: PhaseTimers) -> StepResult:
        result = self.learner.validate(step, timers)
        self.callbacks.notify("on_validation_end", step, result.metrics)
        return result

    def _announce(self) -> None:
        """Notify callbacks of the last run state, once it is completely written."""
        if self._unannounced is not None and not self.store.is_saving:
            step, self._unannounced = self._unannounced, None
            self.callbacks.notify("on_save", step, self.store.path(step))

    def restore(self) -> Restoration | None:
        """Restore the newest readable run state, and remove later steps from the logs.

        Returns None without a run state. Raises `CheckpointError`, and does not change the logs, if
        every run state is damaged.
        """
        self.store.recover()
        states, damaged = self.store.survey()
        restored = None
        for reason in damaged:
            self._say(f"skipped: {reason}", "bold red")
        for saved in reversed(states):  # newest first
            try:
                restored = self._continue_from(saved.path)
                break
            except DamagedStateError as error:
                damaged.append(str(error))
                self._say(f"{error}. The run continues from an earlier state, if any", "bold red")
        if restored is None and damaged:
            raise CheckpointError(
                f"no run state in {self.store.root} can be read: {', '.join(damaged)}. Copy one "
                "back from a backup, set exp_manager.explicit_log_dir to another directory, or "
                "start a new run here with exp_manager.start_anew=true, which keeps earlier files"
            )
        self.resumed_step = None if restored is None else restored.step
        last = -1 if restored is None else restored.step
        on_rank_zero(lambda: self.metrics.truncate_after(last))
        return restored

    def _continue_from(self, path: Path) -> Restoration:
        """Load the run state ``path``. Return its differences from the current run."""
        saved = self.store.load(path)
        remedy = (
            "another algorithm or version of this library wrote it. Set "
            "exp_manager.explicit_log_dir to another directory"
        )
        with raised_as(CheckpointError, f"the run state {path}", KeyError, remedy=remedy):
            learner, layout = saved.state["learner"], saved.state["layout"]
            self.learner.load(learner, path)
            # A random state is valid for one parallel layout only. Each worker restores its state.
            if layout == self.layout and is_rank_zero():
                restore_rng(saved.state["rng"], accelerator.set_rng_state)
            saved_config = saved.state["config"]
            config = without_new_defaults(self.config, saved_config, self.defaults)
            changes = config_changes(saved_config, config)
            self.callbacks.load_state_dict(saved.state.get("callbacks", {}))
        return Restoration(saved.step, path, changes, None if layout == self.layout else layout)

    def _record(
        self, step: int, result: StepResult, timers: PhaseTimers, progress: ConsoleProgress
    ) -> dict[str, float]:
        """Write and show the results of a step. Return its metrics, including times."""
        metrics = {**result.metrics, **timers.flush()}
        # An error of rank 0, such as a full disk, is raised on all ranks, so that no rank waits.
        on_rank_zero(lambda: self.metrics.write(step, metrics, result.samples))
        progress.step(step, metrics)
        for warning in result.warnings:
            self._say(f"step {step}: {warning}", "yellow")
        if is_rank_zero() and (step <= 1 or self.schedule.validates(step)):
            for split in ("train", "val"):
                if samples := [sample for sample in result.samples if sample.split == split]:
                    self.console.print(sample_table(samples))  # samples.jsonl has every step
        return metrics

    def _check_learning(self, step: int, idle: tuple[str, ...], steps_made: int | None) -> None:
        """Warn if all updates of a model were skipped, and raise after too many such steps.

        The limit is ``max_skipped_steps`` consecutive steps, or all steps of a run. ``steps_made``:
        number of steps since the start if ``step`` is the last, else None.
        """
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if not idle:
            return
        steps = f"step {step}"
        if self._idle_steps > 1:
            steps = f"steps {step - self._idle_steps + 1} to {step}"
        message = (
            f"{steps}: no update of the {' and the '.join(idle)} was made, because every loss or "
            "gradient was NaN or infinite"
        )
        if self._idle_steps in (self.schedule.max_skipped_steps, steps_made):
            raise NonFiniteError(
                f"{message}. The run ends, because it learns nothing. The samples are in "
                f"{self.store.root.parent / 'nonfinite'}. Check the rewards and the weights, "
                "lower the learning rate, or raise max_skipped_steps="
                f"{self.schedule.max_skipped_steps}"
            )
        self._say(message, "bold red")

    def _save(self, step: int, metrics: Mapping[str, float], in_background: bool) -> None:
        """Finish an earlier save, then save the state of the learner, the run and callbacks."""
        self.store.finish()
        self._announce()
        callback_states = self.callbacks.state_dict()  # omitted if empty
        self.store.save(
            step,
            {
                "learner": self.learner.state_dict(),
                "config": dict(self.config),
                "identity": dict(self.identity),
                "layout": self.layout,
                "total_steps": self.schedule.total_steps,
                "began": os.environ.get(TEMPLATE_TIME),
                "rng": capture_rng(accelerator.rng_state),
                **({"callbacks": callback_states} if callback_states else {}),
            },
            metric=metrics.get(self.monitor),
            roles=self.learner.roles,
            in_background=in_background,
            on_saved=self.on_saved,
        )
        self._unannounced = step
        self._announce()

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
