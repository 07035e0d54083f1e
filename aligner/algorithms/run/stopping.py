"""Signals that stop a run after its current step is finished and saved."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
_ANNOUNCEMENT = b"Ctrl-C: the run ends after this step is saved. Press again to end at once\n"
# A terminal sends Ctrl-C to every process, and launchers forward it: ignore such a repetition.
_ECHO_S = 0.5


class StopRequest:
    """Request to stop the run. ``name``: name of the signal, or None before a signal."""

    name: str | None = None


@contextmanager
def stop_signal(announce: bool = True) -> Iterator[StopRequest]:
    """Record the first SIGTERM or Ctrl-C in the yielded request. Later signals act as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in _NAMES}
    requested_at = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at
        if request.name is None:
            request.name, requested_at = _NAMES[signal.Signals(number)], time.monotonic()
            if announce and number == signal.SIGINT:
                os.write(2, _ANNOUNCEMENT)
        elif time.monotonic() - requested_at > _ECHO_S:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)

    for number in _NAMES:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
