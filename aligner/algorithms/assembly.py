"""What every run is assembled of, whatever it learns: loop, files, loggers, report."""

import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from aligner.algorithms.run_loop import Learner, Restoration, RunLoop, Schedule
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state import RunStateStore
from aligner.config import BaseRunConfig, LoopConfig, TrainedModelConfig
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.distributed import accelerator
from aligner.distributed.agreement import gather_objects, on_rank_zero, this_rank
from aligner.models.gpt.settings import RunFacts
from aligner.models.role_front import RoleFront
from aligner.observe.environment import describe_environment
from aligner.observe.loggers import make_loggers
from aligner.observe.metric_names import check_names
from aligner.observe.metrics import Logger, MetricsWriter
from aligner.observe.report import write_report
from aligner.observe.samples import SampleWriter


def describe_model(model: TrainedModelConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """Tokenizer and architecture of the model, without reading its weights."""
    with open_model(model.restore_from_path) as checkpoint:
        tokenizer = (
            load_tokenizer(model.tokenizer) if model.tokenizer is not None else checkpoint.tokenizer
        )
        return tokenizer, checkpoint.architecture


def total_steps(config: LoopConfig, sampler: PromptSampler) -> int:
    """Steps of the run: ``max_epochs`` worth of data, ``max_steps`` at most."""
    limit = config.max_steps
    steps = sampler.batches_in(config.max_epochs)
    return steps if limit < 0 else min(limit, steps)


def run_facts(config: BaseRunConfig, loop: LoopConfig) -> RunFacts:
    """What every role of the run is told."""
    return RunFacts(
        precision=config.trainer.precision,
        gradient_clip_val=loop.gradient_clip_val,
        non_finite=loop.non_finite,
        non_finite_dir=log_dir(config),
        seed=config.seed,
    )


def build_loop(
    config: BaseRunConfig,
    intervals: LoopConfig,
    learner: Learner,
    layout: str,
    console: Console,
    steps: int,
    is_restart: bool,
    started: float,
) -> RunLoop:
    """The run loop with its files below ``exp_manager.explicit_log_dir``.

    ``started``: when ``trainer.max_time`` began to run, on the monotonic clock.
    """
    exp = config.exp_manager
    folder = log_dir(config)
    store = RunStateStore(
        folder / "run_state",
        exp.save_top_k,
        exp.monitor,
        exp.mode,
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

    limit = config.trainer.max_seconds
    return RunLoop(
        learner,
        Schedule(
            steps,
            intervals.val_check_interval,
            intervals.save_interval,
            None if limit is None else limit - (time.monotonic() - started),
        ),
        store=store,
        metrics=MetricsWriter(folder, rank=this_rank(), loggers=loggers),
        samples=SampleWriter(folder, rank=this_rank()),
        console=console,
        config=config.as_dict(),
        monitor=exp.monitor,
        layout=layout,
        resume=exp.resume_if_exists or is_restart,
    )


def finish(
    config: BaseRunConfig,
    algorithm: str,
    trained: tuple[str, RoleFront],
    loop: RunLoop,
    console: Console,
    ended: bool,
) -> None:
    """Write the report and, when the run came to its end, the trained model; say where all is.

    ``algorithm``: a word for the report's title. ``trained``: the role that the run is about, and
    how its `.nemo` is called.
    """
    name, role = trained
    folder = log_dir(config)
    places = {
        "report": folder / "report.html",
        "samples": folder / "samples.jsonl",
        "metrics": folder / "metrics.jsonl",
    }
    states = loop.store.states()
    if states:
        places["checkpoint"] = states[-1].path
    if ended and config.exp_manager.save_nemo:
        places["trained .nemo"] = folder / f"{name}.nemo"
        role.save_checkpoint(str(places["trained .nemo"].absolute()))
    on_rank_zero(
        lambda: write_report(
            folder,
            title=f"{algorithm} of {Path(config.model.restore_from_path).name}",
            config=yaml.safe_dump(config.as_dict(), sort_keys=False),
            environment=describe_environment(accelerator.description()),
            artifacts={name: str(path) for name, path in places.items()},
            status="" if ended else "Stopped by a signal; the same command continues.",
        )
    )
    width = max(len(name) for name in places)
    for place, path in places.items():
        console.print(f"{place:>{width}}  {path}", highlight=False, soft_wrap=True)


def check_log_dir(config: BaseRunConfig) -> None:
    """Refuse a directory that cannot be written or that another process writes, and bad names."""
    check_names([config.exp_manager.monitor])
    on_rank_zero(lambda: MetricsWriter(log_dir(config)).close())


def log_dir(config: BaseRunConfig) -> Path:
    """Directory of the run."""
    return Path(config.exp_manager.explicit_log_dir).expanduser()


def notes_on(
    restored: Restoration | None, layout: str, *, dropped: int, what: str, key: str
) -> list[str]:
    """What the start-up report adds: what is not as it was, and the data that was left out.

    ``dropped``: examples (``what``) that are longer than the setting ``key`` allows.
    """
    notes = []
    if restored is not None:
        notes += [f"changed since the saved run: {change}" for change in restored.changes]
        if restored.saved_layout is not None:
            notes.append(
                f"saved on {restored.saved_layout}, continued on {layout}: weights and optimizer "
                "states are the same, random generators (dropout) start from the seed"
            )
    if dropped:
        notes.append(f"{dropped} {what} are longer than {key} and were dropped")
    return notes
