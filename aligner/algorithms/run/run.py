"""A run of any algorithm, from its processes to its report.

::

    with Run.open(config) as run:          processes, console, the run's directory, callbacks, model
        prompts = ...                      read and check all input before models are built
        for attempt in run.attempts():     once, and on Ray again after a worker died
            with attempt:
                policy = attempt.start_policy(...)
                with attempt.loop(PPOTrainer(...), ...) as run_loop:
                    run_loop.run()
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import yaml
from rich.console import Console

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.run import dry_run
from aligner.algorithms.run.calls import Calls
from aligner.algorithms.run.directory import RunDirectory, log_dir
from aligner.algorithms.run.engine import Engine, Workers, open_engine
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
from aligner.observe.metric_names import check_names
from aligner.observe.metrics import MetricsWriter, make_loggers
from aligner.observe.report.run import RunRecord, write_report
from aligner.observe.run_lock import RunLock
from aligner.observe.samples import SampleWriter
from aligner.observe.startup import StartupSummary, startup_report
from aligner.packages import describe_environment
from aligner.parallel.collectives import gather_objects, is_rank_zero, on_rank_zero, this_rank

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger

Config = TypeVar("Config", bound=BaseRunConfig)
Config_co = TypeVar("Config_co", bound=BaseRunConfig, covariant=True)


@dataclass(frozen=True)
class Run(Generic[Config_co]):
    """Objects that a run owns until it ends, created by `open`.

    A dry run changes ``config``. ``console`` is quiet on every rank except the first.
    """

    config: Config_co
    engine: Engine
    console: Console
    callbacks: Callbacks
    tokenizer: Tokenizer
    architecture: GPTArchitecture
    closing: ExitStack

    @staticmethod
    @contextmanager
    def open(config: Config) -> Iterator["Run[Config]"]:
        """Start the processes, prepare the run's directory and read the header of the model's file.

        A dry run (``config.dry_run``) writes to another directory.

        Raises:
            ConfigError: the directory is another run's, or the processes cannot share a batch.
            LayoutError: the model cannot be laid out over the processes.
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

    @property
    def world_size(self) -> int:
        """Number of workers of the policy, or of the only trained model."""
        return self.engine.worlds[0]

    def attempts(self) -> Iterator["Attempt"]:
        """Yield a start of the workers, and another one each time a worker died.

        ``cluster.max_restarts`` limits restarts. The local engine never restarts workers.
        """
        started = time.monotonic()
        for index in range(self.engine.max_restarts + 1):
            attempt = Attempt(self, index, started)
            yield attempt
            if not attempt.has_failed:
                return


def check_roles(
    config: BaseRunConfig, architecture: GPTArchitecture, worlds: tuple[int, int]
) -> None:
    """Raise if workers cannot share the layouts or batches of the trained roles.

    ``worlds``: number of workers of the policy and of the critic (0: no critic).
    """
    check_layout(architecture, config.model.parallel, worlds[0])
    if worlds[1] and config.value_parallel != config.model.parallel:
        check_layout(architecture, config.value_parallel, worlds[1], "critic")
    elif worlds[1]:
        check_layout(architecture, config.value_parallel, worlds[1])
    refuse(config.share_problems(*worlds))


class Attempt(Workers):
    """One start of the workers, as a context that shuts the workers down at its end.

    Unlike a loop around it, a context can suppress an exception of its block: while restarts
    remain, the death of a worker ends the block without an error, and `Run.attempts` restarts.
    """

    def __init__(self, run: Run[BaseRunConfig], index: int, started: float) -> None:
        """Begin attempt ``index``. ``started``: monotonic time at which the run's time began."""
        self._run, self._index, self._started = run, index, started
        self._calls = Calls()
        self.has_failed = False

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            run, clusters = self._run, self._run.engine.clusters(closing)
            run.console.print("starting: building the models and loading their weights")
            if run.config.dry_run:
                clusters = self._calls.watch(clusters)
            workers = closing.pop_all()
        super().__init__(run.config, run.tokenizer, run.architecture, clusters, workers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        # The death of a worker may show only while the others are shut down.
        restarts = self._run.engine.max_restarts
        is_last = self._index == restarts
        try:
            self.closing.__exit__(kind, error, traceback)
        except WorkerDiedError as shutdown_error:  # a death noticed during the shutdown
            if is_last:
                raise
            error = shutdown_error
        if is_last or not isinstance(error, WorkerDiedError):
            return False
        self.has_failed = True
        self._run.console.print(
            f"{error}\nThe workers are restarted, and the run continues from its last state "
            f"(restart {self._index + 1} of cluster.max_restarts={restarts})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return True

    @contextmanager
    def loop(
        self, trainer: Learner, steps: int, summary: StartupSummary, *, saved_as: str = "policy"
    ) -> Iterator[RunLoop | dry_run.DryLoop]:
        """Yield the loop of the trainer's steps, which the block runs.

        The loop restores the newest run state, if any, and the start-up report is printed. At the
        end of the block the run's report and the trained model are written. The loop of a dry run
        measures two steps and writes nothing. ``saved_as`` is the name of the trained `.nemo`.
        """
        config, console = self.config, self._run.console
        if config.dry_run:
            console.print(startup_report(replace(summary, is_dry=True)))
            yield dry_run.DryLoop(config, trainer, self.roles, self._calls, console)
            return
        loop = self._loop(trainer, steps)
        # Restore before the report, which says what was restored.
        restoration = loop.restore()
        notes = [*_notes(config, steps, restoration, loop.layout), *summary.notes]
        if restoration is not None:
            random = ["random states"] if restoration.saved_layout is None else []
            restores = [*summary.restores, *random]
            restored = (restoration.step, str(restoration.path))
            summary = replace(summary, restored=restored, restores=restores)
        console.print(startup_report(replace(summary, notes=notes)))
        try:
            yield loop
            self._finish(loop, trainer, saved_as, summary.device.description)
        except Exception as error:
            loop.callbacks.failed(loop.step, error)
            raise
        loop.callbacks.notify("on_run_end", loop.step, loop.ended_by)

    def _loop(self, trainer: Learner, steps: int) -> RunLoop:
        """Return the run loop, with its files below ``exp_manager.explicit_log_dir``."""
        config, run = self.config, self._run
        exp, folder = config.exp_manager, log_dir(config)
        # The store of run states, and a function that starts the loggers.
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
            latest = store.states()
            restored = latest[-1].step if latest else None
            return make_loggers(folder, exp, restored_step=restored, config=config.as_dict())

        # The loop and its files.
        run.callbacks.begin(config.as_dict(), folder, steps)
        limit = config.trainer.max_seconds
        loop = RunLoop(
            trainer,
            Schedule(
                steps,
                config.loop.val_check_interval,
                config.loop.save_interval,
                None if limit is None else limit - (time.monotonic() - self._started),
                config.loop.max_skipped_steps,
                exp.async_save,
            ),
            store=store,
            metrics=MetricsWriter(folder, rank=this_rank(), loggers=loggers),
            samples=SampleWriter(folder, rank=this_rank()),
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
        self.closing.callback(loop.samples.close)
        return loop

    def _finish(self, loop: RunLoop, trainer: Learner, saved_as: str, device: str) -> None:
        """Write the report and, if the run was not interrupted, the trained model.

        ``device`` describes the workers' devices.
        """
        config, folder, is_complete = self.config, log_dir(self.config), not loop.interrupted
        # Files to name.
        paths = {"report": folder / "report.html"}
        if is_complete:
            samples = folder / "samples.jsonl"
            if on_rank_zero(lambda: samples.exists() and samples.stat().st_size > 0):
                paths["samples"] = samples
            paths["metrics"] = folder / "metrics.jsonl"
            states = loop.store.states()
            if states:
                paths["checkpoint"] = states[-1].path
        # The trained model, unless its weights are not finite.
        suffix = self._run.architecture.suffix
        trained = folder / f"{saved_as}{suffix}"
        saves = is_complete and config.exp_manager.save_nemo
        is_finite = not saves or trainer.trained_role.has_finite_weights()
        if saves and is_finite:
            # An earlier directory of this run is kept until the new one is written.
            earlier = trained.with_name(f".{trained.name}.earlier")
            on_rank_zero(lambda: _rename_directory(trained, earlier))
            trainer.save_model(str(trained.absolute()))
            on_rank_zero(lambda: shutil.rmtree(earlier, ignore_errors=True))
            paths[f"trained {suffix or 'model'}"] = trained
            if config.model.peft.lora is not None:
                paths["its adapters"] = adapters_beside(str(trained.absolute()))
        # The report.
        status = [] if is_complete else ["Stopped by a signal. The same command continues the run."]
        status += [
            f"{note[0].upper()}{note[1:]}."
            for note in _cut_short(config, loop.schedule.total_steps)
        ]
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
                "Go back to an earlier run state, check the rewards and the data, lower the "
                "learning rate, or start from another model"
            )


def prepare_log_dir(config: BaseRunConfig, closing: ExitStack) -> list[str]:
    """Check names, lock the run's directory until ``closing`` closes, and prepare it.

    Returns notes on the directory (see `RunDirectory.prepare`).
    """
    check_names([config.monitor])
    # No other process may write to the directory until the run ends.
    folder = log_dir(config)
    directory = RunDirectory(folder, RunStateStore(folder / "run_state"))

    def prepare() -> list[str]:
        is_new = not folder.exists()
        closing.callback(RunLock(folder).release)
        if is_new:
            closing.callback(directory.remove_if_unused)  # a refused run leaves no files
        return directory.prepare(RunIdentity.of(config), config)

    notes = on_rank_zero(prepare)
    start_time = on_rank_zero(lambda: directory.start_time)
    if start_time is not None:
        closing.enter_context(fixed_time(start_time))
    return notes


def _rename_directory(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which is replaced, if ``source`` is a directory."""
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        source.rename(target)


def _notes(
    config: BaseRunConfig, steps: int, restoration: Restoration | None, layout: str
) -> list[str]:
    """Return notes on limits that make a run shorter, and on changes since the state was saved."""
    limits = _cut_short(config, steps)
    if restoration is None:
        return limits
    changes = [f"changed since the saved run: {change}" for change in restoration.changes]
    if restoration.saved_layout is not None:
        changes.append(
            f"saved on {restoration.saved_layout}, continued on {layout}: weights and optimizer "
            "states are the same, random generators (dropout) start from the seed"
        )
    if restoration.step >= steps:
        limits.append(
            f"nothing is left to do: {restoration.step} steps are finished, and {steps} are "
            f"configured. Raise {config.section}.max_steps or max_epochs to continue"
        )
    return [*changes, *limits]


def _cut_short(config: BaseRunConfig, steps: int) -> list[str]:
    loop = config.loop
    if loop.max_steps <= steps:
        return []
    return [
        f"the run has {steps} of {config.section}.max_steps={loop.max_steps} steps, because "
        f"{config.section}.max_epochs={loop.max_epochs} limits it. Raise max_epochs to go over "
        "the data again"
    ]
