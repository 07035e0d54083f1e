"""A run of any algorithm, from its processes to its report."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import yaml
from rich.console import Console

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.run import dry_run
from aligner.algorithms.run.directory import RunDirectory, log_dir
from aligner.algorithms.run.engine import Clusters, Engine, Workers, open_engine
from aligner.algorithms.run.identity import RunIdentity
from aligner.algorithms.run.loop import Learner, Restoration, RunLoop, Schedule
from aligner.algorithms.run.startup import describe_model_of
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapters_beside
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import BaseRunConfig, check_layout
from aligner.config.parse import defaults_of, refuse
from aligner.data.tokenizers.tokenizer import Tokenizer, fixed_time
from aligner.errors import NonFiniteError, WorkerDiedError
from aligner.observe.metrics import MetricsWriter, check_names, make_loggers
from aligner.observe.report.run import RunRecord, write_report
from aligner.observe.run_lock import RunLock
from aligner.observe.startup import StartupSummary, startup_report
from aligner.packages import describe_environment
from aligner.parallel.collectives import gather_objects, is_rank_zero, on_rank_zero, this_rank

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger

Config = TypeVar("Config", bound=BaseRunConfig)
Config_co = TypeVar("Config_co", bound=BaseRunConfig, covariant=True)


@dataclass(frozen=True)
class Run(Generic[Config_co]):
    """Objects that exist until the run ends, created by `open`. A dry run changes ``config``."""

    config: Config_co
    engine: Engine
    console: Console  # quiet on every rank except the first
    callbacks: Callbacks
    tokenizer: Tokenizer
    architecture: GPTArchitecture
    closing: ExitStack

    @staticmethod
    @contextmanager
    def open(config: Config) -> Iterator["Run[Config]"]:
        """Start the processes, prepare the run's directory and read the model's description.

        Raises:
            ConfigError: the directory contains another run, or the batch size does not fit.
            LayoutError: the parallel layout does not fit the model or the number of processes.
        """
        with ExitStack() as closing:
            if config.dry_run:
                config = closing.enter_context(dry_run.temporary_config(config))
            engine = open_engine(config, closing)
            console = Console(quiet=not is_rank_zero())
            callbacks = Callbacks.load(config.trainer.callbacks)
            for note in [] if config.dry_run else prepare_log_dir(config, closing):
                console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
            console.print("starting: reading the model's description and the data")
            tokenizer, architecture = describe_model_of(config)
            check_roles(config, architecture, engine.worlds)
            yield Run(config, engine, console, callbacks, tokenizer, architecture, closing)

    def attempts(self) -> Iterator[AbstractContextManager["Attempt"]]:
        """Yield a context that starts the workers. Yield another one after a worker has died."""
        started, restarts = time.monotonic(), self.engine.max_restarts
        has_failed = False

        @contextmanager
        def attempt(index: int) -> Iterator[Attempt]:
            nonlocal has_failed
            try:
                with ExitStack() as closing:
                    yield Attempt(self, self.engine.clusters(closing), closing, started)
            except WorkerDiedError as error:  # in the block, or while other workers are shut down
                has_failed = True
                if index == restarts:
                    raise
                text = (
                    f"{error}\nThe workers are restarted, and the run continues from its last state"
                )
                text += f" (restart {index + 1} of cluster.max_restarts={restarts})"
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)

        for index in range(restarts + 1):
            has_failed = False
            yield attempt(index)  # the caller enters the context, which may set ``has_failed``
            if not has_failed:
                return


def check_roles(
    config: BaseRunConfig, architecture: GPTArchitecture, worlds: tuple[int, int]
) -> None:
    """Raise if the numbers of workers do not fit the parallel layouts or the batch sizes."""
    check_layout(architecture, config.model.parallel, worlds[0])
    if worlds[1]:
        section = ["critic"] if config.value_parallel != config.model.parallel else []
        check_layout(architecture, config.value_parallel, worlds[1], *section)
    refuse(config.share_problems(*worlds))


class Attempt(Workers):
    """Workers of a run, from a start to their shutdown. ``started``: monotonic start of the run."""

    def __init__(
        self, run: Run[BaseRunConfig], clusters: Clusters, closing: ExitStack, started: float
    ) -> None:
        self._run, self._started, self._calls = run, started, dry_run.Calls()
        run.console.print("starting: building the models and loading their weights")
        if run.config.dry_run:
            clusters = self._calls.watch(clusters)
        super().__init__(run.config, run.tokenizer, run.architecture, clusters, closing)

    @contextmanager
    def loop(
        self, trainer: Learner, steps: int, summary: StartupSummary, *, saved_as: str = "policy"
    ) -> Iterator[RunLoop | dry_run.DryLoop]:
        """Restore the newest run state, report it, yield the loop, then write report and model."""
        config, console = self.config, self._run.console
        if config.dry_run:
            console.print(startup_report(replace(summary, is_dry=True)))
            yield dry_run.DryLoop(config, trainer, self.roles, self._calls, console)
            return
        loop = self._loop(trainer, steps)
        # Restore the run state first, because the start-up report describes it.
        restoration = loop.restore()
        notes = [*_notes(config, steps, restoration, loop.layout), *summary.notes]
        summary = replace(summary, notes=notes)
        if restoration is not None:
            random = ["random states"] if restoration.saved_layout is None else []
            restored = (restoration.step, str(restoration.path))
            summary = replace(summary, restored=restored, restores=[*summary.restores, *random])
        console.print(startup_report(summary))
        try:
            yield loop
            self._finish(loop, trainer, saved_as, summary.device.description)
        except Exception as error:
            loop.callbacks.failed(loop.step, error)
            raise
        loop.callbacks.notify("on_run_end", loop.step, loop.ended_by)

    def _loop(self, trainer: Learner, steps: int) -> RunLoop:
        """Construct the loop with the store of run states, the metrics writer and callbacks."""
        config, run = self.config, self._run
        exp, section, folder = config.exp_manager, config.loop, log_dir(config)
        run.callbacks.begin(config.as_dict(), folder, steps)
        # When to validate, save and end. The time limit includes earlier attempts.
        limit = config.trainer.max_seconds
        seconds_left = None if limit is None else limit - (time.monotonic() - self._started)
        intervals = (section.val_check_interval, section.save_interval)
        max_skipped = section.max_skipped_steps
        schedule = Schedule(steps, *intervals, seconds_left, max_skipped, exp.async_save)
        # Where to save run states and metrics. The first written metrics start the loggers.
        store = RunStateStore(
            folder / "run_state",
            exp.save_top_k,
            config.monitor,
            exp.mode,
            save_last_k=exp.save_last_k,
            rank=this_rank(),
            exchange=gather_objects,
        )

        def loggers() -> "Sequence[Logger]":
            restored_step = max((state.step for state in store.states()), default=None)
            return make_loggers(folder, exp, restored_step=restored_step, config=config.as_dict())

        loop = RunLoop(
            trainer,
            schedule,
            store=store,
            metrics=MetricsWriter(folder, rank=this_rank(), loggers=loggers),
            console=run.console,
            config=config.as_dict(),
            monitor=config.monitor,
            layout=self.clusters.describe(config),
            identity=RunIdentity.of(config).as_dict() if is_rank_zero() else {},
            on_saved=RunDirectory(folder, store).mark_saved,
            callbacks=run.callbacks,
            defaults=defaults_of(config),
        )
        self.closing.callback(loop.metrics.close)
        return loop

    def _finish(self, loop: RunLoop, trainer: Learner, saved_as: str, device: str) -> None:
        """Write report and model (no model after a signal). Raise if the weights are not finite."""
        config, folder, is_complete = self.config, log_dir(self.config), not loop.interrupted
        # Paths to print at the end.
        paths, samples = {"report": folder / "report.html"}, folder / "samples.jsonl"
        if is_complete:
            if on_rank_zero(lambda: samples.exists() and samples.stat().st_size > 0):
                paths["samples"] = samples
            paths["metrics"] = folder / "metrics.jsonl"
            if states := loop.store.states():
                paths["checkpoint"] = states[-1].path
        # The trained model, unless its weights are not finite.
        suffix = self._run.architecture.suffix
        trained = folder / f"{saved_as}{suffix}"
        saves_model = is_complete and config.exp_manager.save_nemo
        is_finite = not saves_model or trainer.trained_role.has_finite_weights()
        if saves_model and is_finite:
            # Keep a model directory that this run wrote earlier until the new one is complete.
            earlier = trained.with_name(f".{trained.name}.earlier")
            on_rank_zero(lambda: _rename_directory(trained, earlier))
            trainer.save_model(str(trained.absolute()))
            on_rank_zero(lambda: shutil.rmtree(earlier, ignore_errors=True))
            paths[f"trained {suffix or 'model'}"] = trained
            if config.model.peft.lora is not None:
                paths["its adapters"] = adapters_beside(str(trained.absolute()))
        # The report.
        status = [] if is_complete else ["Stopped by a signal. The same command continues the run."]
        for note in _limit_notes(config, loop.schedule.total_steps):
            status.append(f"{note[0].upper()}{note[1:]}.")
        record = RunRecord(
            title=f"{config.algorithm} of {Path(config.model.restore_from_path).name}",
            config=yaml.safe_dump(config.as_dict(), sort_keys=False),
            environment=describe_environment(device),
            artifacts={name: str(path) for name, path in paths.items()},
            status=" ".join(status),
            precision=config.trainer.precision,
        )
        on_rank_zero(lambda: write_report(folder, record))
        width = max(len(name) for name in paths)
        for name, path in paths.items():
            self._run.console.print(f"{name:>{width}}  {path}", highlight=False, soft_wrap=True)
        if not is_finite:
            raise NonFiniteError(
                f"weights of the trained model are NaN or infinite, so {trained} was not written. "
                "Check the rewards and the data, lower the learning rate, continue from an earlier "
                "run state, or start from another model"
            )


def prepare_log_dir(config: BaseRunConfig, closing: ExitStack) -> list[str]:
    """Lock and prepare the run's directory, until ``closing`` closes. Return notes to print."""
    check_names([config.monitor])
    folder = log_dir(config)
    directory = RunDirectory(folder, RunStateStore(folder / "run_state"))

    def prepare() -> tuple[list[str], str | None]:
        is_new = not folder.exists()
        closing.callback(RunLock(folder).release)  # no other process may write there meanwhile
        if is_new:
            closing.callback(directory.remove_if_unused)  # such as after an error at the start
        return directory.prepare(RunIdentity.of(config), config), directory.start_time

    notes, start_time = on_rank_zero(prepare)
    if start_time is not None:
        closing.enter_context(fixed_time(start_time))
    return notes


def _rename_directory(source: Path, target: Path) -> None:
    """Replace the directory ``target`` by ``source``, if ``source`` is a directory."""
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        source.rename(target)


def _notes(
    config: BaseRunConfig, steps: int, restoration: Restoration | None, layout: str
) -> list[str]:
    """Return notes about changes since the saved run state, and limits that shorten the run."""
    if restoration is None:
        return _limit_notes(config, steps)
    notes = [f"changed since the saved run: {change}" for change in restoration.changes]
    if restoration.saved_layout is not None:
        notes.append(
            f"saved on {restoration.saved_layout}, continued on {layout}: weights and optimizer "
            "states are restored, but random generators (dropout) start from the seed"
        )
    notes += _limit_notes(config, steps)
    if restoration.step >= steps:
        notes.append(
            f"no step remains: {restoration.step} steps are finished, and {steps} are configured. "
            f"Raise {config.section}.max_steps or max_epochs to continue"
        )
    return notes


def _limit_notes(config: BaseRunConfig, steps: int) -> list[str]:
    """Return a list with a note if ``max_epochs`` ends the run before ``max_steps``, else []."""
    loop, section = config.loop, config.section
    text = (
        f"the run ends after {steps} of {section}.max_steps={loop.max_steps} steps, because "
        f"{section}.max_epochs={loop.max_epochs} limits it. Raise max_epochs to make all steps"
    )
    return [text] if loop.max_steps > steps else []
