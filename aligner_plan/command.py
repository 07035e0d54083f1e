"""The command: a configuration and a device in, a table or a line of JSON out."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.model_source import open_model
from aligner.config import BaseRunConfig
from aligner.config.commands.plan import PlanConfig
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from aligner_plan.amounts import total
from aligner_plan.devices import device_named
from aligner_plan.estimate import Estimate, Estimator, PlannedPhase
from aligner_plan.measurements import Measurements
from aligner_plan.search import Advice, advice, fastest, fewest

_GIB = 1 << 30
_SHORT = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "kv_cache": "KV",
    "logits": "logits",
    "communication": "comm",
}


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
        values: Mapping[str, Any] = json.loads(file.read_bytes())
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


def show(estimate: Estimate, console: Console) -> None:
    """Print the table, its totals, and the limits of the estimate."""
    found = estimate.as_dict()
    table = Table(box=None, pad_edge=False, title_justify="left")
    columns = ("role", "phase", "GiB", *_SHORT.values(), "beside", "of card")
    for name in (*columns, "TFLOP", "NVLink", "network", "seconds", "tokens/s", "MFU", "bound by"):
        table.add_column(name, justify="left" if name in ("role", "phase", "bound by") else "right")
    for role, phase in estimate.step:
        table.add_row(role, phase, *_cells(estimate, estimate.phase(role, phase)))
    console.print(table)
    role, phase = estimate.fullest
    console.print(
        f"\n{estimate.cards} x {estimate.device.name}: "
        + "; ".join(f"{name} {layout}" for name, layout in found["layout"].items())
    )
    console.print(
        f"{'fits' if estimate.fits else 'does not fit'}: at most {estimate.peak_bytes / _GIB:.1f} "
        f"GiB on a card ({role}, {phase}, in {estimate.phase(role, phase).peak_at or 'rest'}) of "
        f"{estimate.device.memory_bytes / _GIB:.0f}, of which {estimate.margin:.0%} are left to "
        "contexts, NCCL and fragments"
    )
    role, phase = estimate.slowest
    console.print(
        f"a step takes about {estimate.step_seconds:.1f} s: {found['tokens_per_second']:.0f} "
        f"tokens/s are learned; most of it is {phase} of the {role}, bound by {found['bound']}"
    )


def _cells(estimate: Estimate, phase: PlannedPhase) -> list[str]:
    within, across = phase.amounts.wire_bytes(estimate.device)
    mfu = estimate.mfu(phase)
    kinds = {str(kind): size for kind, size in phase.peak.items()}
    return [
        f"{total(phase.peak) / _GIB:.1f}",
        *(_gib(kinds.get(kind, 0.0)) for kind in _SHORT),
        _gib(phase.beside),
        f"{phase.card_bytes / estimate.device.memory_bytes:.0%}",
        f"{sum(phase.amounts.flops.values()) / 1e12:.1f}",
        _gib(within),
        _gib(across),
        f"{phase.seconds:.2f}",
        f"{phase.tokens / phase.seconds:.0f}" if phase.seconds and phase.tokens else "",
        "" if mfu is None else f"{mfu:.0%}",
        phase.time.bound if phase.seconds else "",
    ]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}" if size >= 0.05 * _GIB else ("0" if not size else "<0.1")
