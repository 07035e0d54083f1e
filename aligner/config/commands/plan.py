"""Options of `plan` beside the training configuration that it reads."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Interval
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.catalog import BY_SCRIPT
from aligner.config.commands.lengths import longest_lengths
from aligner.config.fields import Count, FilePath
from aligner.config.load import parse_config
from aligner.config.parse import build
from aligner.config.run import BaseRunConfig
from aligner.errors import ConfigError

PER_NODE = 8  # devices of a node, where more than this many are requested
# Keys without a default that do not affect the requirements of a run.
_UNREAD = {"data.train.source": "not-read.jsonl", "reward.function": "not.read:reward"}


@dataclass(frozen=True)
class PlanConfig:
    """The section ``plan`` of the command line; no training script has it."""

    device: StrictStr = "h100-80g"
    """A name of the table in docs/plan.md."""

    devices: Count | Literal["auto"] | None = None
    """Devices of the whole run. `null` means `trainer.devices` x `trainer.num_nodes`.

    `auto`: as few as it takes, and as many as are worth having.
    """

    architecture: FilePath | None = None
    """A Hugging Face `config.json`, or its directory. `null` means `model.restore_from_path`.

    The shape of the model, without its weights.
    """

    search: StrictBool = False
    """Try layouts, micro-batches, recomputation and offload."""

    json: StrictBool = False
    """One line of JSON instead of a table."""

    margin: Annotated[StrictFloat, Interval(ge=0, le=0.5)] = 0.1
    """Share of the device's memory that is left to what nobody counts here.

    The context, NCCL, cuBLAS, fragments.
    """

    prompt_length: Count | None = None
    """Tokens of every prompt. `null` means `data.max_prompt_length`.

    Where that is null 512, or as many as the response leaves of the model's positions.
    """

    length: Count | None = None
    """Tokens of every example, or of every response.

    `null` means the longest that the configuration allows. 2048 where it allows any.
    """

    advise: StrictBool = True
    """Also measure what would save memory, or time."""

    processes: Count | None = None
    """Processes that measure at a time. `null` means one a CPU core, at most 8."""


@dataclass(frozen=True)
class PlanRequest:
    """The command line, taken apart."""

    plan: PlanConfig
    config_name: str
    root: type[BaseRunConfig]
    arguments: tuple[str, ...]  # for hydra


def plan_request(arguments: Sequence[str], conf_dir: Path) -> PlanRequest:
    """Take ``plan.*`` off a command line, and complete what is left.

    A run of ``plan.devices`` has nodes of `PER_NODE` devices. Paths of weights that
    ``plan.architecture`` stands for, and data and rewards that nobody reads, need not be given.

    Raises:
        ConfigError: a key of ``plan`` is unknown or its value no good; the configuration is not
            that of a training script.
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    for argument in arguments:
        if argument.lstrip("+").startswith("plan."):
            key, value = _parsed(argument.lstrip("+"))
            values[key.removeprefix("plan.")] = value
        else:
            rest.append(argument)
    plan = build(PlanConfig, values, "plan")
    name = _config_name(rest)
    given = {argument.lstrip("+~").partition("=")[0] for argument in rest}
    script = _script(name, conf_dir)
    if script.removeprefix("train_") == name:  # no recipe: it names neither data nor rewards
        for key, value in _UNREAD.items():
            group = key.partition(".")[0]
            if group == "reward" and not _samples(BY_SCRIPT[script].root_class):
                continue
            if not any(one == key or one in (group, f"{group}.kind") for one in given):
                rest.append(f"{key}={value}")
    if plan.architecture is not None:
        rest.append(f"model.restore_from_path={json.dumps(plan.architecture)}")
    if isinstance(plan.devices, int):
        rest += [f"{key}={value}" for key, value in trainer_keys(plan.devices).items()]
    return PlanRequest(plan, name, BY_SCRIPT[script].root_class, tuple(rest))


def trainer_keys(devices: int) -> dict[str, int]:
    """Keys that request this many devices, in whole nodes of `PER_NODE` where they are more.

    Raises:
        ConfigError: they are no whole nodes.
    """
    if devices > PER_NODE and devices % PER_NODE:
        raise ConfigError(
            f"plan.devices={devices} is no multiple of the {PER_NODE} devices of a node. Use "
            f"{devices // PER_NODE * PER_NODE} or {(devices // PER_NODE + 1) * PER_NODE}"
        )
    per_node = min(devices, PER_NODE)
    return {"trainer.devices": per_node, "trainer.num_nodes": devices // per_node}


def varied(config: BaseRunConfig, changes: Mapping[str, Any]) -> BaseRunConfig:
    """``config`` with other values of dotted keys, checked anew; null derives a batch size."""
    values = config.as_dict()
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
    return parse_config(values, type(config))


def with_length(config: BaseRunConfig, plan: PlanConfig, positions: int) -> tuple[int, int]:
    """`longest_lengths` of a model with this many positions, unless ``plan`` gives others."""
    return longest_lengths(config, positions, prompt=plan.prompt_length, length=plan.length)


def _samples(root: type[BaseRunConfig]) -> bool:
    return "reward" in {field.name for field in dataclasses.fields(root)}


def _parsed(argument: str) -> tuple[str, Any]:
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise ConfigError(
            f"{argument}: cannot be read. Write it as plan.KEY=VALUE, with quotes around a value "
            "that has spaces or any of ,:{}[]()="
        ) from error
    value = override.value()
    return override.key_or_group, getattr(value, "text", value)


def _config_name(arguments: Sequence[str]) -> str:
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config-name", "-cn"):
            following = arguments[place + 1 : place + 2]
            return value if equals else "".join(following)
    return "gpt_ppo"


def _script(config_name: str, conf_dir: Path) -> str:
    """The training script that a configuration is for: what its defaults begin with."""
    name = config_name.removesuffix(".yaml")
    for _ in range(16):  # recipes that complete recipes
        if f"train_{name}" in BY_SCRIPT:
            return f"train_{name}"
        path = conf_dir / f"{name}.yaml"
        if not path.is_file():
            break
        defaults = yaml.safe_load(path.read_text()).get("defaults", [])
        parents = [each for each in defaults if isinstance(each, str) and each != "_self_"]
        if not parents:
            break
        name = parents[0].lstrip("/")
    known = ", ".join(each.removeprefix("train_") for each in BY_SCRIPT)
    raise ConfigError(
        f"--config-name {config_name}: no training configuration; plan takes recipes/NAME, and "
        f"{known}"
    )
