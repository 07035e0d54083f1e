"""Timers and the progress display, on a clock that the test moves."""

import io
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from rich.console import Console

from aligner.observe.metrics import PhaseTimers
from aligner.observe.progress import ConsoleProgress, clock_time


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_a_flush_starts_anew():
    clock, entered = Clock(), []
    timers = PhaseTimers(clock=clock, on_enter=entered.append)
    for seconds in (2.0, 3.0):
        with timers("generate"):
            clock.now += seconds
    clock.now += 1.0  # between phases: only in the total

    def fail() -> None:
        with timers("reward"):
            clock.now += 0.5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    expected = {"timers/generate": 5.0, "timers/reward": 0.5, "timers/total": 6.5}
    assert timers.flush() == expected
    assert entered == ["generate", "generate", "reward"]
    clock.now += 0.25
    assert timers.flush() == {"timers/total": 0.25}
    # Queued work is waited for inside the phase.
    clock = Clock()
    queued = [0.0]

    def synchronize() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    timers = PhaseTimers(clock=clock, synchronize=synchronize)
    with timers("forward"):
        queued[0] = 4.0
    assert timers.flush()["timers/forward"] == 4.0


@contextmanager
def display(total, width=140, terminal=False, **options):
    """A progress display, its clock, and the text that it writes."""
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    with ConsoleProgress(total, console=console, clock=clock, **options) as progress:
        yield progress, clock, out


def run_progress(terminal: bool) -> str:
    with display(12, terminal=terminal, done_steps=2) as (progress, clock, out):
        clock.now += 50.0
        progress.step(2, {"val_rollouts/accuracy": 0.25})  # validation; not a training step
        for step, seconds in ((3, 10.0), (4, 20.0)):
            progress.phase("generate")
            clock.now += seconds
            numbers = {"train_rollouts/rewards": step / 8, "train_rollouts/init_policy_kl": 0.01}
            progress.step(step, numbers)
    return out.getvalue()


def lines_of(*steps) -> list[str]:
    with display(len(steps)) as (progress, _, out):
        for step, metrics in enumerate(steps):
            progress.step(step, metrics)
    return [line.split("  0.0 s/step")[0] for line in out.getvalue().splitlines()]


def test_lines_bars_and_silence():
    lines = run_progress(terminal=False).splitlines()
    assert lines[0] == "step 2/12  val accuracy 0.250"
    assert lines[2] == ("step 4/12  reward 0.500  KL 0.0100  15.0 s/step  ETA 0:02:00")
    assert len(lines) == 3
    text = run_progress(terminal=True)
    for part in ("generate", "4/12", "reward 0.500", "KL 0.0100", "ETA 0:02:00"):
        assert part in text
    assert "val accuracy 0.250 (step 2)" in text  # stays on the bar
    with display(3, enabled=False) as (progress, _, out):
        progress.step(1, {})
    assert out.getvalue() == ""
    # Which numbers are shown.
    losses = [{"train_optim/loss": loss, "train_optim/accuracy": 0.75} for loss in (0.5, 0.125)]
    assert lines_of({"val_optim/loss": 0.7}, *losses) == [
        "step 0/3  val loss 0.7",
        "step 1/3  loss 0.5  accuracy 0.750",
        "step 2/3  loss 0.125  accuracy 0.750",
    ]
    metrics = {"train_rollouts/rewards": -0.25, "train_rollouts/init_policy_kl": -1.5e-8}
    metrics["train_optim/loss"] = 0.1
    assert lines_of({}, metrics)[1] == "step 1/2  reward -0.250  KL 0.0000"
    assert [clock_time(s) for s in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]


NARROW = "train                 2/1000            12.3 s/step  ETA 3:24:35 reward 0.400"
WIDE = f"{NARROW}  val accuracy 0.250 (step 0)  KL 0.0100  length 128.5"
SNAPSHOTS = {80: NARROW, 100: NARROW, 160: WIDE}


@pytest.mark.parametrize("width", [30, *SNAPSHOTS])
def test_step_and_remaining_time_stay_at_any_width_and_the_bar_does_not_move(width):
    values = {"rewards": 0.4, "init_policy_kl": 0.01, "generation_length": 128.5}
    metrics = {f"train_rollouts/{name}": value for name, value in values.items()}
    with display(1000, width, terminal=True) as (progress, clock, out):
        progress.step(0, {"val_rollouts/accuracy": 0.25})
        for step in (1, 2):
            progress.phase("reference_logprobs")
            clock.now += 12.3
            progress.step(step, metrics)
            progress.phase("train")
    text = re.sub(r"\x1b\[[?0-9]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    frames = [line for line in text.splitlines() if "/1000" in line]
    assert all(len(frame) <= width for frame in frames)
    if width >= 80:
        assert frames[-1].rstrip() == SNAPSHOTS[width]
        assert len({frame.index("/1000") for frame in frames}) == 1


@pytest.mark.integration
def test_watching_costs_no_slow_imports_at_start_up():
    modules = "metrics samples progress diagnostics nonfinite startup report"
    code = "import sys\n" + "".join(f"import aligner.observe.{m}\n" for m in modules.split())
    code += "print([m for m in ('lightning', 'tensorboard', 'wandb', 'nemo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
