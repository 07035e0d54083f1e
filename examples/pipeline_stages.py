"""Execution of a pipeline: training runs in order, each from earlier models, and a report.

::

    sft ─► reward ─► ppo …        every stage is a separate process: a script with a recipe
     └──► grpo, rs, dpo           evaluate/<stage>: the same prompts for every policy

A finished stage is not repeated. A killed stage continues from its run state. The inputs of a stage
are recorded in its ``stage.json``. If they have changed, the pipeline stops and names the change,
so that no result depends on two configurations.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

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
from aligner.foreign_keys import shown
from aligner.observe.metrics import read_metrics, read_samples
from aligner.packages import describe_environment

if TYPE_CHECKING:  # it imports torch
    from aligner.data.preferences import Pair

RECORD = "stage.json"
_FREE = ("arguments", "kwargs", "loss_kwargs")  # mappings with user-defined keys
_PATIENCE_S = 120.0  # time for a terminated stage to save its run state


@dataclass(frozen=True)
class Stage:
    """A run of a pipeline, with its composed configuration."""

    name: str  # such as sft, or evaluate/sft
    folder: Path
    script: Path
    arguments: list[str]
    takes: dict[str, str]  # configuration keys, and the stages (or start) that provide the models
    models: dict[str, Path]  # configuration keys, and the paths of the models
    config: BaseRunConfig
    trained: Path | None  # the trained `.nemo` (None: an evaluation)

    @property
    def command(self) -> str:
        """Command line of the stage."""
        return shlex.join(["python", f"examples/{self.script.name}", *self.arguments])

    @property
    def began_with(self) -> str:
        """Name of the stage that provides the initial model."""
        return self.takes["model.restore_from_path"]

    @property
    def record(self) -> dict[str, Any]:
        """Content of ``stage.json``. Empty before the stage starts."""
        path = self.folder / RECORD
        return json.loads(path.read_text()) if path.exists() else {}

    def write_record(self, **entries: Any) -> None:
        """Change entries of `record`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RECORD, {**self.record, **entries})

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the result: the configuration, and size and time of the models."""
        models = {}
        for key, path in self.models.items():
            status = path.stat()
            models[key] = f"{path} ({status.st_size} bytes of {status.st_mtime_ns / 1e9:.3f})"
        return {**self.config.as_dict(), "models": models}

    def changes(self) -> list[str]:
        """Describe the changes of the inputs since the stage began, except for new options."""
        current = self.inputs()
        recorded = self.record.get("made_of", current)
        return config_changes(recorded, _without_new_keys(recorded, current))

    def is_done(self) -> bool:
        """Return whether the stage finished with its present inputs and its results still exist."""
        has_model = self.trained is None or self.trained.exists()
        return bool(self.record.get("finished")) and has_model and not self.changes()


def _without_new_keys(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``current`` without the options that ``recorded`` lacks."""
    result = {}
    for key, value in current.items():
        is_section = isinstance(value, Mapping) and isinstance(recorded.get(key), Mapping)
        if is_section and key not in _FREE:
            result[key] = _without_new_keys(recorded[key], value)
        elif key in recorded:
            result[key] = value
    return result


def run_pipeline(path: Path, conf_dir: Path, scripts: Path) -> Path:
    """Run the unfinished stages of the pipeline in a YAML file, and return the report's path.

    ``scripts``: folder of the training scripts. The report is updated after every stage.
    """
    # Compose all stages first, so that an error is raised before any stage runs.
    pipeline = load_pipeline(path)
    stages = plan(pipeline, conf_dir, scripts)
    if not Path(pipeline.start).exists():
        raise CheckpointNotFoundError(
            f"start={pipeline.start} does not exist. `make {pipeline.start}` creates the models of "
            "the shipped pipelines"
        )

    # Run the unfinished stages in order.
    console = Console(highlight=False, soft_wrap=True)
    report = Path(pipeline.folder) / "report.html"
    for position, stage in enumerate(stages, start=1):
        heading = f"stage {position} of {len(stages)}, {stage.name}"
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
    """Compose and check the configurations of all runs, and return the runs in order."""
    trained = {START: Path(pipeline.start)}  # models by stage
    stages: list[Stage] = []

    def add(name: str, run: RecipeConfig, takes: Mapping[str, str], *, trains: bool) -> None:
        # The configuration, as the script will compose it.
        folder = Path(pipeline.folder) / name
        models = {key: trained[source] for key, source in takes.items()}
        settings = {**models, "exp_manager.explicit_log_dir": folder}
        overrides = [*run.overrides, *(f"{key}={value}" for key, value in settings.items())]
        config = compose_run(conf_dir, run, overrides)

        # A stage must save its model, an evaluation must not.
        if config.dry_run:
            raise ConfigError(
                f"recipe {run.recipe}: dry_run=true saves no model for later stages. Leave it out, "
                f"and use it with {run.script} only"
            )
        if config.exp_manager.save_nemo != trains:
            raise ConfigError(
                f"recipe {run.recipe}: exp_manager.save_nemo={shown(not trains)}, but "
                f"{'a stage saves its model' if trains else 'an evaluation saves no model'}. Set "
                f"it to {shown(trains)}"
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
                folder / run.model_file if trains else None,
            )
        )

    def evaluate(name: str) -> None:
        if pipeline.evaluation is not None and trained[name].name != "reward_model.nemo":
            takes = {"model.restore_from_path": name}
            add(f"evaluate/{name}", pipeline.evaluation, takes, trains=False)

    evaluate(START)
    for stage in pipeline.stages:
        add(stage.name, stage, stage.takes, trains=True)
        trained[stage.name] = stages[-1].folder / stage.model_file
        evaluate(stage.name)
    return stages


def check_unmixed(stage: Stage, stages: list[Stage]) -> None:
    """Refuse to continue a training stage in a directory with other inputs or another run."""
    changes = stage.changes()
    if stage.trained is None:  # an evaluation is repeated
        return
    if not stage.record and (stage.folder / "metrics.jsonl").exists():
        changes = [f"{stage.folder} contains another run"]
    if changes:
        outdated = _descendants(stage, stages)
        raise ConfigError(
            f"stage {stage.name} began with other inputs: {'; '.join(changes)}. Undo the change, "
            f"or repeat the stage: rm -r {' '.join(str(item.folder) for item in outdated)}"
        )


def _descendants(stage: Stage, stages: list[Stage]) -> list[Stage]:
    """Return ``stage`` and the existing training stages that depend on its model."""
    names, descendants = {stage.name}, [stage]
    for candidate in stages:
        exists = candidate.trained is not None and candidate.folder.exists()
        if exists and names & set(candidate.takes.values()):
            names.add(candidate.name)
            descendants.append(candidate)
    return descendants


def run_stage(stage: Stage) -> None:
    """Run a stage to its end.

    Raises:
        WorkerError: the stage failed or was stopped.
    """
    # Run the script, and record the time even if the pipeline is stopped.
    if stage.record.get("finished"):  # with other inputs, and its run state was removed
        set_aside(stage.folder)
    earlier_seconds = stage.record.get("seconds", 0.0)
    stage.write_record(made_of=stage.inputs(), seconds=earlier_seconds, finished=False)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(stage.script), *stage.arguments])
    try:
        with _terminated(process):
            status = process.wait()
    finally:
        stage.write_record(seconds=earlier_seconds + time.monotonic() - started)

    # Result.
    if status != 0:
        raise WorkerError(
            f"stage {stage.name} ended with status {status}. Its message is above. The same "
            "command continues from there"
        )
    if stage.trained is not None and not stage.trained.exists():
        raise WorkerError(f"stage {stage.name} was stopped. The same command continues from there")
    stage.write_record(finished=True, facts=pair_summary(stage.config))
    # The run states are several times as large as the model and not needed any more.
    shutil.rmtree(stage.folder / "run_state", ignore_errors=True)


@contextmanager
def _terminated(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass SIGTERM on to ``process``, which saves its state, and end it with the block."""

    def pass_on(signal_number: int, frame: FrameType | None) -> None:
        process.terminate()

    previous = signal.signal(signal.SIGTERM, pass_on)
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
    """Write the report of the finished stages, and ``comparison.json`` in the same folder."""
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
    """Yield the results of the evaluations in order."""
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
    # The mean of a reward function is the share of right answers, unlike a reward model's mean.
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
    """Return the number of held-out ``pairs`` and ``length_accuracy`` of a run on pairs, or {}."""
    if not isinstance(config, RewardRunConfig | DPORunConfig) or config.rows_per_example != 2:
        return {}
    if config.data.validation is None:
        return {}

    # Imports torch.
    from aligner.algorithms.run.startup import describe_model_of
    from aligner.data.preferences import PairDataset

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


def length_accuracy(train: Iterable["Pair"], held_out: Iterable["Pair"]) -> float:
    """Return the accuracy on ``held_out`` of preferring the longer, or the shorter, response.

    ``train`` determines which of the two rules is used. A pair of equal lengths adds one half. A
    reward model should exceed this accuracy.
    """
    longer_is_better = _longer_chosen(train) >= 0.5
    share = _longer_chosen(held_out)
    return share if longer_is_better else 1 - share


def _longer_chosen(pairs: Iterable["Pair"]) -> float:
    gaps = [pair.chosen.length - pair.rejected.length for pair in pairs]
    return sum(0.5 if gap == 0 else float(gap > 0) for gap in gaps) / len(gaps)
