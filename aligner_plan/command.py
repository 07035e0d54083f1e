"""The command ``plan``, which prints a table or a line of JSON for a configuration and a device."""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.any_model import architecture_of, require_megatron
from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.model_source import lacks_table, open_model
from aligner.config import BaseRunConfig
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    json_object,
    raised_as,
)
from aligner_plan.amounts import total
from aligner_plan.devices import device_named
from aligner_plan.estimate import Estimate, Estimator, PlannedPhase
from aligner_plan.measurements import Measurements
from aligner_plan.options import PlanConfig
from aligner_plan.search import advice, fastest, fewest

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
    """Estimate the requirements of a training configuration and print them.

    Raises:
        ConfigError: the device is unknown, the run cannot be planned, or a search finds no layout
            that fits.
        CheckpointError: the model's description cannot be read.
    """
    device = device_named(plan.device)
    with contextlib.closing(Measurements(plan.processes)) as measurements:
        estimator = Estimator(plan, device, architectures_of(config, plan), measurements)
        console = Console(width=220, highlight=False, soft_wrap=True)
        log = (lambda text: None) if plan.json else console.print
        # The estimate, of the configuration or of the best variant that a search finds.
        extra: dict[str, Any] = {}
        overrides: list[str] = []
        notes = ""
        if plan.devices == "auto":
            devices = fewest(estimator, config, log)
            estimate, overrides, notes = devices.least, devices.overrides, f"\n{devices.words}"
            extra = {"auto": devices.as_dict()}
        elif plan.search:
            result = fastest(estimator, config, log)
            estimate, overrides = result.estimate, result.overrides
            extra = {"overrides": overrides, "tried": result.tried}
        else:
            estimate = estimator.estimate(config)
        advised = advice(estimator, estimate) if plan.advise else []
    # The output.
    if plan.json:
        changes = [item.as_dict() for item in advised]
        print(json.dumps({**estimate.as_dict(), **extra, "advice": changes}))
        return
    show(estimate, console)
    if advised:
        state = "" if estimate.fits else " (it does not fit)"
        console.print(f"\neffects of single changes{state}:")
    for item in advised:
        console.print(f"  {item.words}")
    if overrides:
        console.print("\noverrides:\n  " + " ".join(overrides))
    if notes:
        console.print(notes)


def architectures_of(config: BaseRunConfig, plan: PlanConfig) -> dict[str, GPTArchitecture]:
    """Read the architecture of every model of the configuration, by path. No weights are read."""
    paths = {"model.restore_from_path": config.model.restore_from_path}
    for section in ("critic", "teacher"):
        path = getattr(getattr(config, section, None), "restore_from_path", None)
        if path is not None:
            paths[f"{section}.restore_from_path"] = path
    reward = getattr(getattr(config, "reward", None), "model", None)
    if reward is not None:
        paths["reward.model.restore_from_path"] = reward.restore_from_path
    backend, trusted = config.policy.backend, config.model.trust_remote_code
    architectures: dict[str, GPTArchitecture] = {}
    for key, path in paths.items():
        if path in architectures:
            continue
        adapted = config.model.peft.lora is not None and key.startswith(("model", "critic"))
        read = partial(read_architecture, backend=backend, adapted=adapted, trusted=trusted)
        if plan.architecture is not None and path == plan.architecture:
            architectures[path] = read(path)
            continue
        try:
            with open_model(path, backend, adapted, trusted=trusted) as source:
                architectures[path] = source.architecture
        except CheckpointNotFoundError as error:
            if key != "model.restore_from_path" and plan.architecture is not None:
                # Other roles are assumed to have the policy's shape.
                architectures[path] = read(plan.architecture)
                continue
            raise ConfigError(
                f"{key}={path}: this file does not exist. Give the model, or its shape as "
                "plan.architecture=path/to/config.json"
            ) from error
    if backend == "megatron":
        for architecture in architectures.values():
            require_megatron(architecture)
    return architectures


def read_architecture(
    path: str, backend: str | None = None, *, adapted: bool = False, trusted: bool = False
) -> GPTArchitecture:
    """Read the architecture from a Hugging Face ``config.json`` or its directory.

    The other arguments are those of `open_model`.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    text = f"plan.architecture={path}"
    with raised_as(ConfigError, text, OSError, remedy="give a Hugging Face config.json"):
        content = file.read_bytes()
    values = json_object(content, CheckpointError, text)
    if lacks_table(values, backend, adapted, trusted=trusted):
        return architecture_of(values, str(file.parent), trusted=trusted)
    return architecture_from_hf(values)


def show(estimate: Estimate, console: Console) -> None:
    """Print the table, its totals, and the limits of the estimate."""
    values = estimate.as_dict()
    # A row for every phase.
    table = Table(box=None, pad_edge=False, title_justify="left")
    columns = ("role", "phase", "GiB", *_SHORT.values(), "beside", "of card")
    for name in (*columns, "TFLOP", "NVLink", "network", "seconds", "tokens/s", "MFU", "bound by"):
        table.add_column(name, justify="left" if name in ("role", "phase", "bound by") else "right")
    for role, phase in estimate.step:
        table.add_row(role, phase, *_cells(estimate, estimate.phase(role, phase)))
    console.print(table)
    # Cards and layout, memory, time.
    role, phase = estimate.fullest
    console.print(
        f"\n{estimate.cards} x {estimate.device.name}: "
        + "; ".join(f"{name} {layout}" for name, layout in values["layout"].items())
    )
    console.print(
        f"{'fits' if estimate.fits else 'does not fit'}: at most {estimate.peak_bytes / _GIB:.1f} "
        f"GiB on a card ({role}, {phase}, in {estimate.phase(role, phase).peak_at or 'rest'}) of "
        f"{estimate.device.memory_bytes / _GIB:.0f}, of which {estimate.margin:.0%} are left to "
        "contexts, NCCL and fragments"
    )
    role, phase = estimate.slowest
    console.print(
        f"a step takes about {estimate.step_seconds:.1f} s: {values['tokens_per_second']:.0f} "
        f"tokens/s are learned; most of it is {phase} of the {role}, bound by {values['bound']}"
    )


def _cells(estimate: Estimate, phase: PlannedPhase) -> list[str]:
    within, across = phase.amounts.wire_bytes(estimate.device)
    mfu = estimate.mfu(phase)
    kinds = {str(kind): size for kind, size in phase.peak.items()}
    return [
        f"{total(phase.peak) / _GIB:.1f}",
        *(_gib(kinds.get(kind, 0.0)) for kind in _SHORT),
        _gib(phase.other_roles),
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
