"""Configuration of a pipeline of runs, each of which starts from models of earlier runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import StrictStr
from yaml import YAMLError

from aligner.catalog import BY_SCRIPT
from aligner.config.fields import Directory, ModelPath, one_of
from aligner.config.load import load_config
from aligner.config.parse import build
from aligner.config.run import BaseRunConfig
from aligner.errors import ConfigError

START = "start"  # name of the first model of a pipeline
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Script = Annotated[StrictStr, one_of(BY_SCRIPT)]


@dataclass(frozen=True)
class RecipeConfig:
    """A script with a recipe and overrides."""

    script: Script
    """A script of `examples/`."""

    recipe: StrictStr
    """A recipe of `conf/recipes/`."""

    overrides: tuple[StrictStr, ...] = ()
    """`KEY=VALUE` or `GROUP=OPTION`, as on the command line."""

    @property
    def model_file(self) -> str:
        """File name of the trained model."""
        return "reward_model.nemo" if self.script == "train_gpt_reward" else "policy.nemo"


@dataclass(frozen=True, kw_only=True)
class StageConfig(RecipeConfig):
    """One run of a pipeline."""

    name: StrictStr
    """Name of the stage, and of its directory in the pipeline's directory."""

    takes: Mapping[str, Any] = field(default_factory=lambda: {"model.restore_from_path": START})
    """Configuration keys that are set to trained models: `KEY: STAGE`, or `KEY: start`."""


@dataclass(frozen=True)
class PipelineConfig:
    """All stages of a pipeline."""

    title: StrictStr
    """Title of the report."""

    folder: Directory
    """Directory of all files of the pipeline."""

    start: ModelPath
    """The `.nemo` from which the first stage starts."""

    stages: tuple[StageConfig, ...]
    """Stages in the order in which they run."""

    evaluation: RecipeConfig | None = None
    """Evaluation of every policy, the start included: a run without steps that validates.

    `null` means no evaluation.
    """


def load_pipeline(path: Path) -> PipelineConfig:
    """Read and check a YAML file. A ``ConfigError`` names the file and the key."""
    if not path.is_file():
        raise ConfigError(f"pipeline {path} does not exist. See the files of conf/pipelines/")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        pipeline = build(PipelineConfig, values)
        _check(pipeline)
    except (OmegaConfBaseException, YAMLError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return pipeline


def _check(pipeline: PipelineConfig) -> None:
    if not pipeline.stages:
        raise ConfigError("stages: empty. Add at least one stage")
    names = [START]
    for index, stage in enumerate(pipeline.stages):
        key, reserved = f"stages[{index}]", [*names, "evaluate"]
        if not _NAME.fullmatch(stage.name) or stage.name in reserved:
            raise ConfigError(
                f"{key}.name: {stage.name!r} must consist of lower-case letters, digits and "
                f"underscores, and differ from {', '.join(reserved)}"
            )
        # A stage can only use models of earlier stages.
        for source in stage.takes.values():
            if source not in names:
                raise ConfigError(
                    f"{key}.takes: {source!r} is not an earlier stage. Use one of "
                    f"{', '.join(names)}"
                )
        names.append(stage.name)


def compose_run(conf_dir: Path, run: RecipeConfig, overrides: Sequence[str]) -> BaseRunConfig:
    """Return the validated configuration of ``run``'s script with these overrides."""
    try:
        with initialize_config_dir(config_dir=str(conf_dir.resolve()), version_base="1.3"):
            tree = compose(f"recipes/{run.recipe}", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {run.recipe} with {' '.join(overrides)}: {error}") from error
    return load_config(tree, BY_SCRIPT[run.script].root_class)
