"""Progress and samples of a run on the console: a progress bar, or lines without a terminal."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from aligner.observe.metrics import Sample

_PHASE_WIDTH, _BAR_WIDTH = 18, 10  # characters; no name of a phase is longer
_RECENT = 8  # steps from which the remaining time is estimated
_SHOWN = (  # metric, label, format (z: a value that rounds to 0 has no sign)
    ("train_rollouts/rewards", "reward", "{:z.3f}"),
    ("train_optim/loss", "loss", "{:z.4g}"),
    ("train_optim/accuracy", "accuracy", "{:z.3f}"),
    ("val_rollouts/accuracy", "val accuracy", "{:z.3f}"),
    ("val_optim/loss", "val loss", "{:z.4g}"),
    ("val_optim/accuracy", "val accuracy", "{:z.3f}"),
    ("train_rollouts/init_policy_kl", "KL", "{:z.4f}"),
    ("train_rollouts/generation_length", "length", "{:z.1f}"),
)
# If a run has rewards, its loss does not measure progress.
_HIDDEN_WITH_REWARDS = ("train_optim/loss", "train_optim/accuracy")


class ConsoleProgress:
    """Shows the phase, the main metrics and the remaining time of a run on the console.

    A terminal shows a progress bar. Print other output through the same ``console``. Without a
    terminal, one line per step is printed. ``done_steps``: number of steps that are already done
    when a run is resumed. ``enabled``: False on ranks that print nothing. ``clock``: returns a
    monotonic time in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        console: Console,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done, self.console, self._clock = total_steps, done_steps, console, clock
        self._enabled = enabled
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._start = clock()
        self._latest: dict[str, tuple[int, float]] = {}  # metric → step and value, the newest
        self._bar: RichProgress | None = None
        if enabled and console.is_terminal:
            # Phase, step and bar have constant widths, so that the bar does not move.
            self._bar = RichProgress(
                TextColumn(f"[bold]{{task.description:<{_PHASE_WIDTH}.{_PHASE_WIDTH}}}"),
                MofNCompleteColumn(),
                BarColumn(bar_width=_BAR_WIDTH),
                TextColumn("[dim]{task.fields[eta]}"),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._task = self._bar.add_task(
                "starting", total=total_steps, completed=done_steps, numbers="", eta=""
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Show the current phase in the bar. Without a terminal this has no effect."""
        if self._bar is not None:
            self._bar.update(self._task, description=name.replace("_", " "))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a completed step. Step 0 is the validation before training."""
        now = self._clock()
        if step > self.done:
            self._seconds.append((now - self._start) / (step - self.done))
        self._start, self.done = now, step
        for name, _, _ in _SHOWN:
            if name in metrics:
                self._latest[name] = (step, metrics[name])
        if self._bar is not None:
            eta = self.remaining()
            fixed = _PHASE_WIDTH + 2 * len(str(self.total)) + 1 + _BAR_WIDTH + len(eta) + 4
            numbers = self.numbers(self.console.width - fixed)
            self._bar.update(self._task, completed=step, numbers=numbers, eta=eta)
        elif self._enabled:
            parts = filter(None, [f"step {step}/{self.total}", self.numbers(), self.remaining()])
            self.console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def numbers(self, width: float = math.inf) -> str:
        """Return the main metrics as text of at most ``width`` characters.

        The last metrics are left out if the text is too long. Metrics of an earlier step are shown
        in the bar only, with that step's number.
        """
        parts = []
        has_rewards = "train_rollouts/rewards" in self._latest
        for name, label, form in _SHOWN:
            if name not in self._latest or (has_rewards and name in _HIDDEN_WITH_REWARDS):
                continue
            step, value = self._latest[name]
            is_old = step != self.done
            if not is_old or self._bar is not None:
                parts.append(f"{label} {form.format(value)}" + f" (step {step})" * is_old)
        while parts and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)

    def remaining(self) -> str:
        """Return ``12.3 s/step  ETA 0:04:06``, estimated from recent steps. "" before the first."""
        if not self._seconds:
            return ""
        step_s = sum(self._seconds) / len(self._seconds)
        return f"{step_s:.1f} s/step  ETA {clock_time(step_s * max(self.total - self.done, 0))}"


def clock_time(seconds: float) -> str:
    """Format seconds as ``H:MM:SS``."""
    rounded = round(seconds)
    return f"{rounded // 3600}:{rounded // 60 % 60:02d}:{rounded % 60:02d}"


def sample_table(samples: Sequence[Sample]) -> Table:
    """Return a console table of ``samples``, with the middle of long prompts left out."""
    kind = "training" if samples[0].split == "train" else "validation"
    title = f"{kind} samples of step {samples[0].step}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_lines=True)
    for column, style in (("prompt", "dim"), ("response", ""), ("truth", "dim"), ("reward", "")):
        table.add_column(column, style=style, overflow="fold")
    table.add_column("tokens", justify="right")
    for sample in samples:
        prompt = sample.prompt if len(sample.prompt) <= 160 else "…" + sample.prompt[-160:]
        # Show line ends, because it matters where a response ends, but no control codes.
        response = "".join(
            char if char.isprintable() or char == "\n" else "\ufffd"
            for char in sample.response.replace("\n", "⏎\n")
        )
        tokens = f"{sample.response_length}{'' if sample.is_end else ' (cut)'}"
        table.add_row(
            Text(prompt),  # Text: brackets in the model's words are not markup
            Text(response),
            Text(sample.ground_truth or ""),
            Text(f"{sample.reward:.4g}", style="green" if sample.reward > 0 else "red"),
            tokens,
        )
    return table
