"""Parts that every run is assembled from, whatever it learns: engine, loop, files, loggers, report.

launch_run ─► load (data, before any model is built) ─► attempt ─► run_to_the_end
                                                         ▲   │
                                                         └───┘ a worker died (Ray)
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.run import dry_run
from aligner.algorithms.run.directory import RunDirectory, RunIdentity
from aligner.algorithms.run.engine import Clusters, Engine, open_engine, with_restarts
from aligner.algorithms.run.loop import Learner, Restoration, RunLoop, Schedule
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import (
    adapter_shapes,
    adapters_beside,
    check_same,
    read_adapters,
)
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import BaseRunConfig, LoopConfig, SamplingRunConfig, TrainedModelConfig
from aligner.data.prompts import PromptDataset
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizers.loading import named_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.accelerator import DeviceFacts
from aligner.distributed.agreement import gather_objects, is_rank_zero, on_rank_zero, this_rank
from aligner.errors import NonFiniteError
from aligner.models.gpt.role.settings import RunFacts
from aligner.models.role_front import RoleFront
from aligner.observe.environment import describe_environment
from aligner.observe.loggers import make_loggers
from aligner.observe.metric_names import check_names
from aligner.observe.metrics import Logger, MetricsWriter
from aligner.observe.report.run import write_report
from aligner.observe.run_lock import RunLock
from aligner.observe.samples import SampleWriter
from aligner.observe.startup import Restored, StartupFacts, startup_report

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Attempt:
    """One start of the workers. ``closing`` ends what must not outlive it."""

    clusters: Clusters
    console: Console
    closing: ExitStack
    is_restart: bool
    started: float  # when ``trainer.max_time`` began to run, on the monotonic clock
    callbacks: Callbacks = field(default_factory=Callbacks)


@dataclass(frozen=True)
class Assembled:
    """A learner and what is to be said of it."""

    learner: Learner
    intervals: LoopConfig
    steps: int
    layout: str  # of the roles, in words
    trained: tuple[str, RoleFront]  # the role that the run is about, and how its `.nemo` is called
    restores: Sequence[str]  # what a run state brings back, in words
    # From what the workers compute on, what was restored, and notes.
    facts: Callable[[DeviceFacts, Restored | None, list[str]], StartupFacts]
    notes: list[str]
    before_saving: Callable[[], None] | None = None  # once the run has come to its end


def launch_run(
    config: BaseRunConfig,
    load: Callable[[Engine, ExitStack], Inputs],
    run: Callable[[Inputs, Attempt], None],
) -> None:
    """Start the engine, ``load`` what the run reads, and ``run`` it; again where workers died."""
    with ExitStack() as closing:
        engine = open_engine(config, log_dir(config), closing)
        console = Console(quiet=not is_rank_zero())
        callbacks = Callbacks.load(config.trainer.callbacks)
        for note in [] if config.dry_run else prepare_log_dir(config, closing):
            console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
        inputs = load(engine, closing)
        started = time.monotonic()

        def attempt(number: int) -> None:
            with ExitStack() as workers:
                clusters = engine.clusters(workers)
                run(inputs, Attempt(clusters, console, workers, number > 0, started, callbacks))

        with_restarts(engine, console, attempt)


def run_to_the_end(config: BaseRunConfig, run: Assembled, attempt: Attempt) -> None:
    """Go on from the newest run state, or begin; write the report and the trained model.

    A dry run is measured instead.
    """
    if config.dry_run:
        facts = run.facts(run.trained[1].device_facts(), None, list(run.notes))
        attempt.console.print(startup_report(replace(facts, is_dry=True)))
        dry_run.make_steps(config, run.learner, attempt.console)
        return
    loop = build_loop(config, run, attempt)
    attempt.closing.callback(loop.metrics.close)
    attempt.closing.callback(loop.samples.close)
    restoration = loop.restore()
    restored = None
    notes = [
        *_changes(restoration, run.layout),
        *_length_notes(config, run, None if restoration is None else restoration.step),
        *run.notes,
    ]
    if restoration is not None:
        items = list(run.restores)
        if restoration.saved_layout is None:
            items.append("random states")
        restored = Restored(restoration.step, str(restoration.path), items)
    device = run.trained[1].device_facts()
    attempt.console.print(startup_report(run.facts(device, restored, notes)))
    try:
        ended = loop.run(None if restoration is None else restoration.step)
        finish(config, run, loop, attempt.console, ended, device.description)
    except Exception as error:
        loop.callbacks.failed(loop.step, error)
        raise
    loop.callbacks.tell("on_run_end", loop.step, loop.ended_by)


def describe_model(model: TrainedModelConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """Tokenizer and architecture of the model, without reading its weights.

    Adapters that do not fit it are refused.
    """
    with open_model(model.restore_from_path) as checkpoint:
        tokenizer = (
            checkpoint.tokenizer
            if model.tokenizer is None
            else named_tokenizer(model.tokenizer, key="model.tokenizer")
        )
        _check_adapters(model, checkpoint.architecture)
        ends = model.rollout.sampling_params.end_tokens
        return tokenizer.with_end_tokens(ends), checkpoint.architecture


def _check_adapters(model: TrainedModelConfig, architecture: GPTArchitecture) -> None:
    lora, path = model.peft.lora, model.peft.restore_from_path
    if lora is None:
        return
    adapter_shapes(architecture, lora)
    if path is not None:
        check_same(lora, read_adapters(path, architecture).lora, path)


def total_steps(config: LoopConfig, sampler: PromptSampler) -> int:
    """Steps of the run: ``max_epochs`` worth of data, ``max_steps`` at most."""
    limit = config.max_steps
    steps = sampler.batches_in(config.max_epochs)
    return steps if limit < 0 else min(limit, steps)


def run_facts(config: BaseRunConfig, loop: LoopConfig) -> RunFacts:
    """Settings that all roles of the run share."""
    return RunFacts(
        precision=config.trainer.precision,
        gradient_clip_val=loop.gradient_clip_val,
        non_finite=loop.non_finite,
        non_finite_dir=log_dir(config),
        seed=config.seed,
        cuda_graphs=not isinstance(config, SamplingRunConfig) or config.generation.cuda_graphs,
    )


def build_loop(config: BaseRunConfig, run: Assembled, attempt: Attempt) -> RunLoop:
    """The run loop with its files below ``exp_manager.explicit_log_dir``."""
    exp = config.exp_manager
    folder = log_dir(config)
    store = RunStateStore(
        folder / "run_state",
        exp.save_top_k,
        config.monitor,
        exp.mode,
        save_last_k=exp.save_last_k,
        rank=this_rank(),
        exchange=gather_objects,
    )

    def loggers() -> Sequence[Logger]:
        latest = store.states()
        return make_loggers(
            folder,
            restored_step=latest[-1].step if latest else None,
            tensorboard=exp.create_tensorboard_logger,
            wandb=exp.create_wandb_logger,
            wandb_options={
                "project": exp.wandb.project,
                "name": exp.wandb.name,
                **exp.wandb.kwargs,
            },
            config=config.as_dict(),
        )

    attempt.callbacks.begin(config.as_dict(), folder, run.steps)
    limit = config.trainer.max_seconds
    return RunLoop(
        run.learner,
        Schedule(
            run.steps,
            run.intervals.val_check_interval,
            run.intervals.save_interval,
            None if limit is None else limit - (time.monotonic() - attempt.started),
            run.intervals.max_skipped_steps,
            exp.async_save,
        ),
        store=store,
        metrics=MetricsWriter(folder, rank=this_rank(), loggers=loggers),
        samples=SampleWriter(folder, rank=this_rank()),
        console=attempt.console,
        config=config.as_dict(),
        monitor=config.monitor,
        layout=run.layout,
        identity=RunIdentity.of(config).as_dict() if is_rank_zero() else None,
        on_saved=RunDirectory(folder, store).mark_saved,
        callbacks=attempt.callbacks,
    )


def finish(
    config: BaseRunConfig,
    run: Assembled,
    loop: RunLoop,
    console: Console,
    ended: bool,
    device: str,
) -> None:
    """Write the report and, when the run came to its end, the trained model; print their paths."""
    name, role = run.trained
    folder = log_dir(config)
    places = {"report": folder / "report.html"}
    if ended:
        samples = folder / "samples.jsonl"
        if on_rank_zero(lambda: samples.exists() and samples.stat().st_size > 0):
            places["samples"] = samples
        places["metrics"] = folder / "metrics.jsonl"
        states = loop.store.states()
        if states:
            places["checkpoint"] = states[-1].path
    saves = ended and config.exp_manager.save_nemo
    is_sound = not saves or role.has_finite_weights()
    if saves and is_sound:
        if run.before_saving is not None:
            run.before_saving()
        places["trained .nemo"] = folder / f"{name}.nemo"
        trained = str(places["trained .nemo"].absolute())
        role.save_checkpoint(trained)
        if config.model.peft.lora is not None:
            places["its adapters"] = adapters_beside(trained)
    on_rank_zero(
        lambda: write_report(
            folder,
            title=f"{config.algorithm} of {Path(config.model.restore_from_path).name}",
            config=yaml.safe_dump(config.as_dict(), sort_keys=False),
            environment=describe_environment(device),
            artifacts={name: str(path) for name, path in places.items()},
            status=" ".join(
                [
                    *([] if ended else ["Stopped by a signal; the same command continues."]),
                    *(f"{note[0].upper()}{note[1:]}." for note in _cut_short(config, run)),
                ]
            ),
        )
    )
    width = max(len(name) for name in places)
    for place, path in places.items():
        console.print(f"{place:>{width}}  {path}", highlight=False, soft_wrap=True)
    if not is_sound:
        raise NonFiniteError(
            f"weights of the trained model are NaN or infinite, so {folder / name}.nemo was not "
            "written; go back to an earlier run state, look at the rewards and the data, lower the "
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

    return on_rank_zero(prepare)


def log_dir(config: BaseRunConfig) -> Path:
    """Directory of the run."""
    return Path(config.exp_manager.explicit_log_dir).expanduser()


def _changes(restored: Restoration | None, layout: str) -> list[str]:
    """Changes since the state was saved."""
    if restored is None:
        return []
    notes = [f"changed since the saved run: {change}" for change in restored.changes]
    if restored.saved_layout is not None:
        notes.append(
            f"saved on {restored.saved_layout}, continued on {layout}: weights and optimizer "
            "states are the same, random generators (dropout) start from the seed"
        )
    return notes


def _length_notes(config: BaseRunConfig, run: Assembled, done: int | None) -> list[str]:
    """Notes on limits that make a run shorter than expected."""
    notes = _cut_short(config, run)
    if done is not None and done >= run.steps:
        notes.append(
            f"nothing is left to do: {done} steps are made and {run.steps} are asked for; raise "
            f"{config.section}.max_steps or max_epochs to go on"
        )
    return notes


def _cut_short(config: BaseRunConfig, run: Assembled) -> list[str]:
    loop = run.intervals
    if loop.max_steps <= run.steps:
        return []
    return [
        f"the run has {run.steps} of {config.section}.max_steps={loop.max_steps} steps, for "
        f"{config.section}.max_epochs={loop.max_epochs} has no more; raise it to go over the data "
        "again"
    ]


def shared_note(train: PromptDataset, validation: PromptDataset | None) -> list[str]:
    """Note that validation prompts are learned from, too; empty where none is."""
    if validation is None:
        return []
    learned = {tuple(train[index].ids) for index in range(len(train))}
    count = sum(tuple(validation[index].ids) in learned for index in range(len(validation)))
    if not count:
        return []
    return [
        f"{count} of {len(validation)} validation prompts are training prompts, too: what "
        "validation says of them is no news"
    ]


def dropped_note(count: int, what: str, key: str) -> list[str]:
    """Note that ``count`` examples are longer than ``key`` allows; empty where none is."""
    return [f"{count} {what} are longer than {key} and were dropped"] if count else []
