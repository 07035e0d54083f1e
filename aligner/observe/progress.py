"""The progress of a run on the console: a live bar, or plain lines where there is no terminal."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

_RECENT = 8  # steps that the estimate of the remaining time is based on
_SHOWN = (  # metric, label, format (z: a number that rounds to 0 has no sign)
    ("train_rollouts/rewards", "reward", "{:z.3f}"),
    ("train_optim/loss", "loss", "{:z.4g}"),
    ("train_optim/accuracy", "accuracy", "{:z.3f}"),
    ("val_rollouts/accuracy", "val accuracy", "{:z.3f}"),
    ("val_optim/loss", "val loss", "{:z.4g}"),
    ("val_optim/accuracy", "val accuracy", "{:z.3f}"),
    ("train_rollouts/init_policy_kl", "KL", "{:z.4f}"),
    ("train_rollouts/generation_length", "length", "{:z.1f}"),
)
# The loss of an algorithm that learns from rewards is no measure of its progress.
_NOT_BESIDE_REWARDS = ("train_optim/loss", "train_optim/accuracy")


class Progress:
    """Phase, reward, KL and remaining time of a run.

    Args:
        total_steps: steps of the whole run.
        done_steps: steps already behind (a resumed run).
        console: where to; a terminal gets a live bar, anything else one line per step. Print
            other things through the same console while the bar is shown.
        enabled: False on ranks that print nothing.
        clock: a monotonic clock in seconds.
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
        self._latest: dict[str, tuple[int, float]] = {}  # newest value, and the step it is of
        self._bar: RichProgress | None = None
        if enabled and console.is_terminal:
            self._bar = RichProgress(
                TextColumn("[bold]{task.description:<12}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("[dim]{task.fields[eta]}"),
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
        """Show what is being done; without a terminal, nothing is printed for it."""
        if self._bar is not None:
            self._bar.update(self._task, description=name.replace("_", " "))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that ``step`` (counted from 1) is done, with its metrics under their full names.

        Step 0, the validation before training, moves no bar and starts the clock anew.
        """
        now = self._clock()
        if step > self.done:
            self._seconds.append((now - self._start) / (step - self.done))
        self._start, self.done = now, step
        for name, _, _ in _SHOWN:
            if name in metrics:
                self._latest[name] = (step, metrics[name])
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, numbers=self.numbers(), eta=self.remaining()
            )
        elif self._enabled:
            parts = [f"step {step}/{self.total}", self.numbers(), self.remaining()]
            self.console.print("  ".join(p for p in parts if p), highlight=False, soft_wrap=True)

    def numbers(self) -> str:
        """``reward 0.412  KL 0.0031 …``.

        A line has what its step measured. The bar, which stays, has the newest value of each; where
        it is of an earlier step (a validation), that step is named.
        """
        shown = []
        for name, label, form in _SHOWN:
            step, value = self._latest.get(name, (None, 0.0))
            is_old = step != self.done
            beside = name in _NOT_BESIDE_REWARDS and "train_rollouts/rewards" in self._latest
            if step is None or beside or (is_old and self._bar is None):
                continue
            shown.append(f"{label} {form.format(value)}" + f" (step {step})" * is_old)
        return "  ".join(shown)

    def remaining(self) -> str:
        """``12.3 s/step  ETA 0:04:06``; empty before the first step."""
        if not self._seconds:
            return ""
        each = sum(self._seconds) / len(self._seconds)
        return f"{each:.1f} s/step  ETA {clock_time(each * max(self.total - self.done, 0))}"


def clock_time(seconds: float) -> str:
    """Seconds as ``H:MM:SS``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
