"""Runs one after the other, each from models that earlier ones left, and a report that compares.

::

    sft ─► reward ─► ppo …        every stage a process of its own: the script, its recipe
     └──► grpo, rs, dpo           evaluate/<stage>: the same questions to every policy

A stage that is finished is not run again; one that was killed goes on from its run state, as any
run does. What a stage was made of stands in its ``stage.json``. Where that is no longer so the
pipeline stops and names the change, so that no result is mixed from two.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from aligner.algorithms.run.directory import config_changes, set_aside
from aligner.checkpoint.durable import write_json
from aligner.config import BaseRunConfig, DPORunConfig, RewardRunConfig, SamplingRunConfig
from aligner.device import accelerator
from aligner.errors import CheckpointNotFoundError, ConfigError, WorkerError
from aligner.examples.comparison import (
    ComparedPolicy,
    Comparison,
    Learned,
    held_out_measures,
    save_comparison,
)
from aligner.examples.pipeline_config import (
    START,
    PipelineConfig,
    RecipeConfig,
    compose_run,
    load_pipeline,
)
from aligner.observe.metrics import read_metrics
from aligner.observe.samples import read_samples
from aligner.packages import describe_environment

RECORD = "stage.json"
_FREE = ("arguments", "kwargs", "loss_kwargs")  # mappings whose keys are the user's
_PATIENCE_S = 120.0  # for a stage that is asked to end: it saves its state first


@dataclass(frozen=True)
class Stage:
    """A run of a pipeline, ready to be started."""

    name: str  # such as sft, or evaluate/sft
    folder: Path
    script: Path
    arguments: list[str]
    takes: dict[str, str]  # stage (or start) by the configuration key that is set to its model
    models: dict[str, Path]  # those models
    config: BaseRunConfig
    trained: Path | None  # the `.nemo` that it leaves; None: it only measures

    @property
    def command(self) -> str:
        """Command line as typed."""
        return shlex.join(["python", f"examples/{self.script.name}", *self.arguments])

    @property
    def began_with(self) -> str:
        """Name of the stage whose model it takes first."""
        return self.takes["model.restore_from_path"]

    @property
    def record(self) -> dict[str, Any]:
        """Record of the stage as far as it has come; `write_record` adds to it."""
        path = self.folder / RECORD
        return json.loads(path.read_text()) if path.exists() else {}

    def write_record(self, **entries: Any) -> None:
        """Set entries of `record`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RECORD, {**self.record, **entries})

    def made_of(self) -> dict[str, Any]:
        """Inputs that decide its result: the configuration, and size and time of the models."""
        models = {}
        for key, path in self.models.items():
            found = path.stat()
            models[key] = f"{path} ({found.st_size} bytes of {found.st_mtime_ns / 1e9:.3f})"
        return {**self.config.as_dict(), "models": models}

    def changes(self) -> list[str]:
        """Changes since the stage began, in words.

        Options that came into the library since then are passed over.
        """
        now = self.made_of()
        before = self.record.get("made_of", now)
        return config_changes(before, _known_to(before, now))

    def is_done(self) -> bool:
        """Return whether the stage finished with its present inputs and its results still exist."""
        there = self.trained is None or self.trained.exists()
        return bool(self.record.get("finished")) and there and not self.changes()


def _known_to(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """``now`` without the options that ``before`` has no key for."""
    kept = {}
    for key, value in now.items():
        is_section = isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
        if is_section and key not in _FREE:
            kept[key] = _known_to(before[key], value)
        elif key in before:
            kept[key] = value
    return kept


def run_pipeline(path: Path, conf_dir: Path, scripts: Path) -> Path:
    """Run what is not done of the pipeline in the YAML file ``path``; return the report.

    ``scripts``: the folder of the training scripts. The report is written after every stage, of
    those that are done.
    """
    pipeline = load_pipeline(path)
    stages = plan(pipeline, conf_dir, scripts)
    if not Path(pipeline.start).exists():
        raise CheckpointNotFoundError(
            f"start={pipeline.start} does not exist; `make {pipeline.start}` makes the models of "
            "the shipped pipelines"
        )
    console = Console(highlight=False, soft_wrap=True)
    report = Path(pipeline.folder) / "report.html"
    for number, stage in enumerate(stages, start=1):
        heading = f"stage {number} of {len(stages)}, {stage.name}"
        if stage.is_done():
            console.print(f"{heading}: done")
            continue
        check_unmixed(stage, stages)
        console.print(f"{heading}: {stage.command}", markup=False)
        run_stage(stage)
        compare(pipeline, stages, report)
    compare(pipeline, stages, report)
    console.print(f"the comparison is {report}")
    return report


def plan(pipeline: PipelineConfig, conf_dir: Path, scripts: Path) -> list[Stage]:
    """Every run in its order, its configuration composed and checked."""
    left = {START: Path(pipeline.start)}  # models
    stages: list[Stage] = []

    def add(name: str, run: RecipeConfig, takes: Mapping[str, str], *, trains: bool) -> None:
        folder = Path(pipeline.folder) / name
        models = {key: left[taken] for key, taken in takes.items()}
        settings = {**models, "exp_manager.explicit_log_dir": folder}
        overrides = [*run.overrides, *(f"{key}={value}" for key, value in settings.items())]
        config = compose_run(conf_dir, run, overrides)
        if config.dry_run:
            raise ConfigError(
                f"recipe {run.recipe}: dry_run=true leaves nothing for later stages. Leave it out, "
                f"and give it to {run.script} alone"
            )
        if config.exp_manager.save_nemo != trains:
            raise ConfigError(
                f"recipe {run.recipe}: exp_manager.save_nemo={config.exp_manager.save_nemo}; "
                f"{'a stage leaves its model' if trains else 'an evaluation leaves no model'}"
            )
        stages.append(
            Stage(
                name,
                folder,
                scripts / f"{run.script}.py",
                ["--config-name", f"recipes/{run.recipe}", *overrides],
                dict(takes),
                models,
                config,
                folder / run.leaves if trains else None,
            )
        )

    def evaluate(name: str) -> None:
        if pipeline.evaluation is not None and left[name].name != "reward_model.nemo":
            takes = {"model.restore_from_path": name}
            add(f"evaluate/{name}", pipeline.evaluation, takes, trains=False)

    evaluate(START)
    for stage in pipeline.stages:
        add(stage.name, stage, stage.takes, trains=True)
        left[stage.name] = stages[-1].folder / stage.leaves
        evaluate(stage.name)
    return stages


def check_unmixed(stage: Stage, stages: list[Stage]) -> None:
    """Refuse to train on in a directory that another configuration or model began."""
    changes = stage.changes()
    if stage.trained is None:  # it measures anew
        return
    if not stage.record and (stage.folder / "metrics.jsonl").exists():
        changes = [f"{stage.folder} holds a run of its own"]
    if changes:
        outdated = _descendants(stage, stages)
        raise ConfigError(
            f"stage {stage.name} was begun otherwise: {'; '.join(changes)}. Undo that, or make it "
            f"anew: rm -r {' '.join(str(one.folder) for one in outdated)}"
        )


def _descendants(stage: Stage, stages: list[Stage]) -> list[Stage]:
    """``stage``, and the training stages there are that take its model or that of another one."""
    found = [stage]
    for other in stages:
        there = other.trained is not None and other.folder.exists()
        if there and {one.name for one in found} & set(other.takes.values()):
            found.append(other)
    return found


def run_stage(stage: Stage) -> None:
    """Run it to its end; `WorkerError` where it does not come there."""
    if stage.record.get("finished"):  # and is to be made again: its run state is gone
        set_aside(stage.folder)
    before = stage.record.get("seconds", 0.0)
    stage.write_record(made_of=stage.made_of(), seconds=before, finished=False)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(stage.script), *stage.arguments])
    try:
        with _ended(process):
            status = process.wait()
    finally:
        stage.write_record(seconds=before + time.monotonic() - started)
    if status != 0:
        raise WorkerError(
            f"stage {stage.name} ended with status {status}; its own message stands above. The "
            "same command goes on from there"
        )
    if stage.trained is not None and not stage.trained.exists():
        raise WorkerError(f"stage {stage.name} was stopped; the same command goes on from there")
    stage.write_record(finished=True, facts=pair_summary(stage.config))
    # Several times the size of the model, and nothing goes on from it.
    shutil.rmtree(stage.folder / "run_state", ignore_errors=True)


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """SIGTERM is for ``process``, which then saves its state; it does not outlive the block."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        process.terminate()

    previous = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compare(pipeline: PipelineConfig, stages: list[Stage], report: Path) -> None:
    """Write the report of the stages that are finished, and its numbers beside it."""
    finished = [stage for stage in stages if stage.record.get("finished")]
    comparison = Comparison(
        title=pipeline.title,
        policies=list(_policies(finished)),
        learned=[_learned(stage) for stage in finished if stage.trained is not None],
        environment=describe_environment(accelerator.description()),
        missing=len(stages) - len(finished),
    )
    save_comparison(report, comparison)


def _policies(finished: list[Stage]) -> Iterator[ComparedPolicy]:
    """Results of the evaluations, in their order."""
    parents = {stage.name: stage.began_with for stage in finished if stage.trained is not None}
    for stage in finished:
        if stage.trained is None:
            [line] = read_metrics(stage.folder / "metrics.jsonl")
            yield ComparedPolicy(
                stage.began_with,
                parents.get(stage.began_with),
                line["val_rollouts/accuracy"],
                int(line["val_rollouts/num_samples"]),
                read_samples(stage.folder / "samples.jsonl"),
            )


def _learned(stage: Stage) -> Learned:
    config, record = stage.config, stage.record
    metrics = read_metrics(stage.folder / "metrics.jsonl")
    # A reward function gives the share of right answers itself; a model's reward is another number.
    is_counted = isinstance(config, SamplingRunConfig) and config.reward.kind == "function"
    return Learned(
        name=stage.name,
        began_with=stage.began_with,
        metrics=metrics,
        measures=list(held_out_measures(metrics, record.get("facts") or {}, is_counted)),
        seconds=record["seconds"],
        command=stage.command,
        files={"model": str(stage.trained), "report": str(stage.folder / "report.html")},
    )


def pair_summary(config: BaseRunConfig) -> dict[str, float]:
    """``pairs`` held out and ``length_accuracy``, of a run that learns from pairs; else nothing."""
    if not isinstance(config, RewardRunConfig | DPORunConfig) or config.rows_per_example != 2:
        return {}
    if config.data.validation is None:
        return {}
    from aligner.algorithms.run.startup import describe_model_of
    from aligner.data.preferences import PairDataset, length_accuracy

    tokenizer, _ = describe_model_of(config)
    train = PairDataset.load(config.data.train, tokenizer, config.data)
    held_out = PairDataset.load(config.data.validation, tokenizer, config.data)
    count = min(len(held_out), config.loop.limit_val_examples or len(held_out))
    return {
        "pairs": count,
        "length_accuracy": length_accuracy(
            (train[index] for index in range(len(train))),
            [held_out[index] for index in range(count)],
        ),
    }
