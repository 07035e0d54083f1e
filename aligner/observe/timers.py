"""Seconds per phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Adds up the time of named phases; phases may repeat and may be nested.

    Args:
        synchronize: called before the clock is read at either end, so that queued device work is
            counted where it was ordered.
        on_enter: called with the name of a phase as it begins (the progress bar shows it).
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] = lambda: None,
        on_enter: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._synchronize, self._on_enter, self._clock = synchronize, on_enter, clock
        self._seconds: dict[str, float] = {}
        self._start = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block as part of ``phase``, also when it raises."""
        self._on_enter(phase)
        self._synchronize()
        start = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def flush(self) -> dict[str, float]:
        """``timers/<phase>`` and ``timers/total`` (all time since the last flush); starts anew."""
        now = self._clock()
        metrics = {f"timers/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["timers/total"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics
