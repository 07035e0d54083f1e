"""Options of the command `plan`, in addition to the training configuration that it reads."""

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
from aligner.config.cli import option_value
from aligner.config.combinations import multiples_near
from aligner.config.commands.lengths import longest_lengths
from aligner.config.fields import Count, FilePath
from aligner.config.load import parse_config
from aligner.config.parse import build
from aligner.config.run import BaseRunConfig
from aligner.errors import ConfigError

PER_NODE = 8  # devices of a node in runs on several nodes
# Required keys that affect neither memory nor speed.
_UNREAD = {"data.train.source": "not-read.jsonl", "reward.function": "not.read:reward"}


@dataclass(frozen=True)
class PlanConfig:
    """Section ``plan`` of the command line. Training scripts do not read it."""

    device: StrictStr = "h100-80g"
    """Name of a device in the table of docs/plan.md."""

    devices: Count | Literal["auto"] | None = None
    """Devices of all nodes. `null` means `trainer.devices` x `trainer.num_nodes`.

    `auto` finds the fewest devices that suffice, and the most that are worth their cost.
    """

    architecture: FilePath | None = None
    """A Hugging Face `config.json`, or its directory. `null` means `model.restore_from_path`.

    Only the architecture is read, no weights.
    """

    search: StrictBool = False
    """Try layouts, micro-batch sizes, recomputation and offload."""

    json: StrictBool = False
    """Print one line of JSON instead of a table."""

    margin: Annotated[StrictFloat, Interval(ge=0, le=0.5)] = 0.1
    """Fraction of the device memory reserved for memory that the plan does not count.

    Examples are the CUDA context, NCCL, cuBLAS and fragmentation.
    """

    prompt_length: Count | None = None
    """Tokens of every prompt. `null` means `data.max_prompt_length`.

    If both are null, a prompt has 512 tokens, or fewer if the response leaves fewer of the model's
    positions.
    """

    length: Count | None = None
    """Tokens of every example, or of every response.

    `null` means the longest that the configuration allows, or 2048 if it sets no limit.
    """

    advise: StrictBool = True
    """Measure also changes that would save memory or time."""

    processes: Count | None = None
    """Processes that measure at the same time. `null` means one per CPU core, at most 8."""


@dataclass(frozen=True)
class PlanRequest:
    """Options of ``plan``, and the training configuration to compose."""

    plan: PlanConfig
    config_name: str
    root: type[BaseRunConfig]
    arguments: tuple[str, ...]  # for hydra


def plan_request(arguments: Sequence[str], conf_dir: Path) -> PlanRequest:
    """Separate ``plan.*`` from a command line, and complete the arguments of the training run.

    A run of ``plan.devices`` has nodes of `PER_NODE` devices. ``plan.architecture`` replaces the
    path of weights. Data and rewards are optional.

    Raises:
        ConfigError: a key of ``plan`` is unknown or has an invalid value, or the configuration does
            not belong to a training script.
    """
    # Options of the plan.
    values: dict[str, Any] = {}
    overrides: list[str] = []
    for argument in arguments:
        if argument.lstrip("+").startswith("plan."):
            key, value = _parsed(argument.lstrip("+"))
            values[key.removeprefix("plan.")] = value
        else:
            overrides.append(argument)
    plan = build(PlanConfig, values, "plan")

    # Required keys that the command line need not set. A recipe sets data and rewards.
    name = option_value(overrides, "--config-name", "-cn") or "gpt_ppo"
    set_keys = {argument.lstrip("+~").partition("=")[0] for argument in overrides}
    script = _script(name, conf_dir)
    root = BY_SCRIPT[script].root_class
    if script.removeprefix("train_") == name:
        sections = {field.name for field in dataclasses.fields(root)}
        for key, value in _UNREAD.items():
            group = key.partition(".")[0]
            if group in sections and not set_keys & {key, group, f"{group}.kind"}:
                overrides.append(f"{key}={value}")
    if plan.architecture is not None:
        overrides.append(f"model.restore_from_path={json.dumps(plan.architecture)}")
    if isinstance(plan.devices, int):
        overrides += [f"{key}={value}" for key, value in trainer_keys(plan.devices).items()]
    return PlanRequest(plan, name, root, tuple(overrides))


def trainer_keys(devices: int) -> dict[str, int]:
    """Return the keys that request a number of devices, in nodes of at most `PER_NODE` devices.

    Raises:
        ConfigError: more than `PER_NODE` devices do not fill all nodes.
    """
    if devices > PER_NODE and devices % PER_NODE:
        raise ConfigError(
            f"plan.devices={devices} is not a multiple of the {PER_NODE} devices of a node. Use "
            f"{multiples_near(devices, PER_NODE)}"
        )
    per_node = min(devices, PER_NODE)
    return {"trainer.devices": per_node, "trainer.num_nodes": devices // per_node}


def varied(config: BaseRunConfig, changes: Mapping[str, Any]) -> BaseRunConfig:
    """Return a validated copy of ``config`` with changed values of dotted keys.

    A batch size of None is derived from the other sizes.
    """
    values = config.as_dict()
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
    return parse_config(values, type(config))


def with_length(config: BaseRunConfig, plan: PlanConfig, positions: int) -> tuple[int, int]:
    """Return `longest_lengths` with the lengths of ``plan``, for a number of model positions."""
    return longest_lengths(config, positions, prompt=plan.prompt_length, length=plan.length)


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


def _script(config_name: str, conf_dir: Path) -> str:
    """Return the training script of a configuration: the first entry of its ``defaults``."""
    name = config_name.removesuffix(".yaml")
    for _ in range(16):  # recipes that extend recipes
        # A script has the same name, a recipe names its parent first.
        if f"train_{name}" in BY_SCRIPT:
            return f"train_{name}"
        path = conf_dir / f"{name}.yaml"
        if not path.is_file():
            break
        defaults = yaml.safe_load(path.read_text()).get("defaults", [])
        parents = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
        if not parents:
            break
        name = parents[0].lstrip("/")
    names = ", ".join(script.removeprefix("train_") for script in BY_SCRIPT)
    raise ConfigError(
        f"--config-name {config_name}: not a training configuration. Use recipes/NAME or one of "
        f"{names}"
    )
