"""A pipeline: runs of which each takes models that earlier ones left."""

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

START = "start"  # the name of the model that a pipeline begins with
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Script = Annotated[StrictStr, one_of(BY_SCRIPT)]


@dataclass(frozen=True)
class RecipeConfig:
    """A script with a recipe, and what is set differently."""

    script: Script
    """A script of `examples/`."""

    recipe: StrictStr
    """A recipe of `conf/recipes/`."""

    overrides: tuple[StrictStr, ...] = ()
    """`KEY=VALUE` or `GROUP=OPTION`, as on the command line."""

    @property
    def leaves(self) -> str:
        """The file name of the trained model."""
        return "reward_model.nemo" if self.script == "train_gpt_reward" else "policy.nemo"


@dataclass(frozen=True, kw_only=True)
class StageConfig(RecipeConfig):
    """One run of a pipeline."""

    name: StrictStr
    """Its directory below the pipeline's."""

    takes: Mapping[str, Any] = field(default_factory=lambda: {"model.restore_from_path": START})
    """Configuration key: the earlier stage whose trained `.nemo` it is set to; or `start`."""


@dataclass(frozen=True)
class PipelineConfig:
    """The runs, in their order."""

    title: StrictStr
    """Title of the report."""

    folder: Directory
    """Directory below which everything is."""

    start: ModelPath
    """The `.nemo` that the first stage takes."""

    stages: tuple[StageConfig, ...]
    """Runs in their order."""

    evaluation: RecipeConfig | None = None
    """Asked of every policy, the start included: a run that validates and makes no step.

    null: none.
    """


def load_pipeline(path: Path) -> PipelineConfig:
    """Read and check a YAML file; ``ConfigError`` names the file and the key."""
    if not path.is_file():
        raise ConfigError(f"pipeline {path}: no such file; conf/pipelines/ has those there are")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        pipeline = build(PipelineConfig, values)
        _check(pipeline)
    except (OmegaConfBaseException, YAMLError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return pipeline


def _check(pipeline: PipelineConfig) -> None:
    if not pipeline.stages:
        raise ConfigError("stages: empty; a pipeline has at least one")
    known = [START]
    for index, stage in enumerate(pipeline.stages):
        key = f"stages[{index}]"
        if not _NAME.fullmatch(stage.name) or stage.name in [*known, "evaluate"]:
            raise ConfigError(
                f"{key}.name: {stage.name!r} must be lower-case letters, digits and underscores, "
                f"and none of {', '.join([*known, 'evaluate'])}"
            )
        for taken in stage.takes.values():
            if taken not in known:
                raise ConfigError(
                    f"{key}.takes: {taken!r} is no earlier stage. Use one of {', '.join(known)}"
                )
        known.append(stage.name)


def compose_run(conf_dir: Path, run: RecipeConfig, overrides: Sequence[str]) -> BaseRunConfig:
    """The configuration that ``run``'s script will see, with all ``overrides``, validated."""
    try:
        with initialize_config_dir(config_dir=str(conf_dir.resolve()), version_base="1.3"):
            tree = compose(f"recipes/{run.recipe}", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {run.recipe} with {' '.join(overrides)}: {error}") from error
    return load_config(tree, BY_SCRIPT[run.script].root_class)
