"""The command: a configuration and a device in, a table or a line of JSON out."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.model_source import open_model
from aligner.config import BaseRunConfig
from aligner.config.commands.plan import PlanConfig
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from aligner.plan.devices import device_named
from aligner.plan.estimate import Estimate, Estimator
from aligner.plan.measurements import Measurements
from aligner.plan.search import Advice, advice, fastest, fewest
from aligner.plan.table import show


def run_plan(config: BaseRunConfig, plan: PlanConfig) -> None:
    """Estimate the requirements of a training configuration.

    Raises:
        ConfigError: an unknown device, a run that cannot be looked at before, or, of a search,
            no layout that fits.
        CheckpointError: the model's description cannot be read.
    """
    device = device_named(plan.device)
    measurements = Measurements(plan.processes)
    with contextlib.closing(measurements):
        estimator = Estimator(plan, device, architectures_of(config, plan), measurements)
        _answer(config, plan, estimator)


def _answer(config: BaseRunConfig, plan: PlanConfig, estimator: Estimator) -> None:
    console = Console(width=220, highlight=False, soft_wrap=True)
    say = (lambda text: None) if plan.json else console.print
    if plan.devices == "auto":
        answer = fewest(estimator, config, say)
        found, chosen = answer.least, answer.overrides
        extra: dict[str, Any] = {"auto": answer.as_dict()}
    elif plan.search:
        result = fastest(estimator, config, say)
        found, chosen = result.estimate, result.overrides
        extra = {"overrides": chosen, "tried": result.tried}
    else:
        found, chosen, extra = estimator.estimate(config), [], {}
    advised = advice(estimator, found) if plan.advise else []
    if plan.json:
        values = {**found.as_dict(), **extra, "advice": [each.as_dict() for each in advised]}
        print(json.dumps(values))
        return
    show(found, console)
    _say_advice(found, advised, console)
    if chosen:
        console.print("\noverrides:\n  " + " ".join(chosen))
    if "auto" in extra:
        console.print("\n" + answer.words)


def architectures_of(config: BaseRunConfig, plan: PlanConfig) -> dict[str, GPTArchitecture]:
    """Shape of every model that the configuration names, by its path; no weights are read."""
    paths = {"model.restore_from_path": config.model.restore_from_path}
    for section in ("critic", "teacher"):
        path = getattr(getattr(config, section, None), "restore_from_path", None)
        if path is not None:
            paths[f"{section}.restore_from_path"] = path
    reward = getattr(getattr(config, "reward", None), "model", None)
    if reward is not None:
        paths["reward.model.restore_from_path"] = reward.restore_from_path
    found: dict[str, GPTArchitecture] = {}
    for key, path in paths.items():
        if path in found:
            continue
        if plan.architecture is not None and path == plan.architecture:
            found[path] = read_architecture(path)
            continue
        try:
            with open_model(path) as source:
                found[path] = source.architecture
        except CheckpointNotFoundError as error:
            if key != "model.restore_from_path" and plan.architecture is not None:
                found[path] = read_architecture(plan.architecture)  # of the same shape, then
                continue
            raise ConfigError(
                f"{key}={path}: there is no such file; give its shape as "
                "plan.architecture=path/to/config.json, or the model"
            ) from error
    return found


def read_architecture(path: str) -> GPTArchitecture:
    """The shape that a Hugging Face ``config.json``, or its directory, describes."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        values: Mapping[str, Any] = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"plan.architecture={path}: there is no such file; give a Hugging Face config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"plan.architecture={path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"plan.architecture={path}: holds no mapping")
    return architecture_from_hf(values)


def _say_advice(found: Estimate, advised: list[Advice], console: Console) -> None:
    if advised:
        console.print("\nwhat would change it" + ("" if found.fits else " (it does not fit)") + ":")
    for each in advised:
        console.print(f"  {each.words}")
