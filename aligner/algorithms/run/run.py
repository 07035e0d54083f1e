"""A run of any algorithm, from its processes to its report.

::

    with Run.open(config) as run:          processes, console, the run's directory, callbacks, model
        prompts = ...                      all input is read and checked before a model is built
        for attempt in run.attempts():     once; on Ray again after a worker died
            with attempt:
                policy = attempt.start_policy(...)
                with attempt.loop(PPOTrainer(...), ...) as run_loop:
                    run_loop.run()
"""

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
from aligner.data.tokenizers.clock import fixed_time
from aligner.data.tokenizers.tokenizer import Tokenizer
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
    """Everything that a run owns until it ends; `open` makes it.

    Args:
        config: of the run; a dry run's differs from what was given.
        engine: gives out the clusters on which workers are started.
        console: quiet on every rank but the first.
        callbacks: the user's.
        tokenizer: the model's.
        architecture: the model's.
        closing: ends what must not outlive the run.
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
        """Start the processes, prepare the run's directory and look into the model's file.

        A dry run (``config.dry_run``) leaves the directory alone and writes to another.

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
            tokenizer, architecture = describe_model_of(config)
            check_roles(config, architecture, engine.worlds)
            yield Run(config, engine, console, callbacks, tokenizer, architecture, closing)

    @property
    def world_size(self) -> int:
        """Workers of the policy, or of the one model that is trained."""
        return self.engine.worlds[0]

    def attempts(self) -> Iterator["Attempt"]:
        """Starts of the workers: one, and another each time that one of them died.

        There are at most ``cluster.max_restarts`` more; none on the local engine.
        """
        started = time.monotonic()
        for number in range(self.engine.max_restarts + 1):
            attempt = Attempt(self, number, started)
            yield attempt
            if not attempt.has_failed:
                return


def check_roles(
    config: BaseRunConfig, architecture: GPTArchitecture, worlds: tuple[int, int]
) -> None:
    """Refuse layouts, and batches, of the trained roles that their workers cannot share.

    ``worlds``: workers of the policy and of the critic (0: there is none).
    """
    check_layout(architecture, config.model.parallel, worlds[0])
    if worlds[1] and config.value_parallel != config.model.parallel:
        check_layout(architecture, config.value_parallel, worlds[1], "critic")
    elif worlds[1]:
        check_layout(architecture, config.value_parallel, worlds[1])
    refuse(config.share_problems(*worlds))


class Attempt(Workers):
    """One start of the workers, as a context: they are shut down at its end.

    A context can swallow what its block raises, which the loop around it cannot: while restarts are
    left, the death of a worker ends the block without an error, and `Run.attempts` gives another.
    """

    def __init__(self, run: Run[BaseRunConfig], number: int, started: float) -> None:
        """``started``: when ``trainer.max_time`` began to run, on the monotonic clock."""
        self._run, self._number, self._started = run, number, started
        self._calls = Calls()
        self.has_failed = False

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            run, clusters = self._run, self._run.engine.clusters(closing)
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
        restarts = self._run.engine.max_restarts
        is_last = self._number == restarts
        try:
            self.closing.__exit__(kind, error, traceback)
        except WorkerDiedError as died:  # noticed while the others were shut down
            if is_last:
                raise
            error = died
        if is_last or not isinstance(error, WorkerDiedError):
            return False
        self.has_failed = True
        self._run.console.print(
            f"{error}\nthe workers are started anew and the run goes on from its last state "
            f"(restart {self._number + 1} of cluster.max_restarts={restarts})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return True

    @contextmanager
    def loop(
        self, trainer: Learner, steps: int, summary: StartupSummary, *, saved_as: str = "policy"
    ) -> Iterator[RunLoop | dry_run.DryLoop]:
        """The loop of the trainer's steps, to be run in the block.

        It goes on from the newest run state, or begins; the start-up report is printed before. At
        the end of the block the run's report and the trained model are written. Of a dry run the
        loop measures two steps, and nothing is written. ``saved_as``: name of the trained `.nemo`.
        """
        config, console = self.config, self._run.console
        if config.dry_run:
            console.print(startup_report(replace(summary, is_dry=True)))
            yield dry_run.DryLoop(config, trainer, self.roles, self._calls, console)
            return
        loop = self._loop(trainer, steps)
        found = loop.restore()
        notes = [*_changes(found, loop.layout), *_left_to_do(config, steps, found), *summary.notes]
        if found is not None:
            random = ["random states"] if found.saved_layout is None else []
            restores = [*summary.restores, *random]
            restored = (found.step, str(found.path))
            summary = replace(summary, restored=restored, restores=restores)
        console.print(startup_report(replace(summary, notes=notes)))
        try:
            yield loop
            self._finish(loop, trainer, saved_as, summary.device.description)
        except Exception as error:
            loop.callbacks.failed(loop.step, error)
            raise
        loop.callbacks.tell("on_run_end", loop.step, loop.ended_by)

    def _loop(self, trainer: Learner, steps: int) -> RunLoop:
        """The run loop with its files below ``exp_manager.explicit_log_dir``."""
        config, run = self.config, self._run
        exp, folder = config.exp_manager, log_dir(config)
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
            identity=RunIdentity.of(config).as_dict() if is_rank_zero() else None,
            on_saved=RunDirectory(folder, store).mark_saved,
            callbacks=run.callbacks,
            defaults=defaults_of(config),
        )
        self.closing.callback(loop.metrics.close)
        self.closing.callback(loop.samples.close)
        return loop

    def _finish(self, loop: RunLoop, trainer: Learner, saved_as: str, device: str) -> None:
        """Write the report and, when the run came to its end, the trained model; print their paths.

        ``device``: what the workers compute on, in words.
        """
        config, folder, ended = self.config, log_dir(self.config), not loop.interrupted
        places = {"report": folder / "report.html"}
        if ended:
            samples = folder / "samples.jsonl"
            if on_rank_zero(lambda: samples.exists() and samples.stat().st_size > 0):
                places["samples"] = samples
            places["metrics"] = folder / "metrics.jsonl"
            states = loop.store.states()
            if states:
                places["checkpoint"] = states[-1].path
        trained = folder / f"{saved_as}.nemo"
        saves = ended and config.exp_manager.save_nemo
        is_sound = not saves or trainer.trained_role.has_finite_weights()
        if saves and is_sound:
            trainer.save_model(str(trained.absolute()))
            places["trained .nemo"] = trained
            if config.model.peft.lora is not None:
                places["its adapters"] = adapters_beside(str(trained.absolute()))
        status = [] if ended else ["Stopped by a signal; the same command continues."]
        status += [
            f"{note[0].upper()}{note[1:]}."
            for note in _cut_short(config, loop.schedule.total_steps)
        ]
        record = RunRecord(
            title=f"{config.algorithm} of {Path(config.model.restore_from_path).name}",
            config=yaml.safe_dump(config.as_dict(), sort_keys=False),
            environment=describe_environment(device),
            artifacts={name: str(path) for name, path in places.items()},
            status=" ".join(status),
            precision=config.trainer.precision,
        )
        on_rank_zero(lambda: write_report(folder, record))
        width = max(len(name) for name in places)
        for place, path in places.items():
            self._run.console.print(f"{place:>{width}}  {path}", highlight=False, soft_wrap=True)
        if not is_sound:
            raise NonFiniteError(
                f"weights of the trained model are NaN or infinite, so {trained} was not written; "
                "go back to an earlier run state, look at the rewards and the data, lower the "
                "learning rate, or start from another model"
            )


def prepare_log_dir(config: BaseRunConfig, closing: ExitStack) -> list[str]:
    """Refuse a directory that is not this run's or cannot be written, and bad names.

    No other process may write it until ``closing`` closes. What is to be said of the directory is
    returned; see `run.directory`.
    """
    check_names([config.monitor])
    folder = log_dir(config)
    directory = RunDirectory(folder, RunStateStore(folder / "run_state"))

    def prepare() -> list[str]:
        closing.callback(RunLock(folder).release)
        return directory.prepare(RunIdentity.of(config), config)

    notes = on_rank_zero(prepare)
    began = on_rank_zero(lambda: directory.began)
    if began is not None:
        closing.enter_context(fixed_time(began))
    return notes


def _changes(found: Restoration | None, layout: str) -> list[str]:
    """Changes since the state was saved."""
    if found is None:
        return []
    notes = [f"changed since the saved run: {change}" for change in found.changes]
    if found.saved_layout is not None:
        notes.append(
            f"saved on {found.saved_layout}, continued on {layout}: weights and optimizer "
            "states are the same, random generators (dropout) start from the seed"
        )
    return notes


def _left_to_do(config: BaseRunConfig, steps: int, found: Restoration | None) -> list[str]:
    """Notes on limits that make a run shorter than expected."""
    notes = _cut_short(config, steps)
    if found is not None and found.step >= steps:
        notes.append(
            f"nothing is left to do: {found.step} steps are made and {steps} are asked for; raise "
            f"{config.section}.max_steps or max_epochs to go on"
        )
    return notes


def _cut_short(config: BaseRunConfig, steps: int) -> list[str]:
    loop = config.loop
    if loop.max_steps <= steps:
        return []
    return [
        f"the run has {steps} of {config.section}.max_steps={loop.max_steps} steps, for "
        f"{config.section}.max_epochs={loop.max_epochs} has no more; raise it to go over the data "
        "again"
    ]
