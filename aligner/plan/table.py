"""An estimate for people."""

from rich.console import Console
from rich.table import Table

from aligner.plan.amounts import total
from aligner.plan.estimate import Estimate, PlannedPhase

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


def show(estimate: Estimate, console: Console) -> None:
    """Print the table, what it comes to, and what it does not know."""
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
