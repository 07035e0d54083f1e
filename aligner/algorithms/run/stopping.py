"""Signals that end a run: the step at hand is finished and saved first."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
# A terminal sends Ctrl-C to every process, and launchers hand it on: that is not a second one.
_ECHO_S = 0.5


class StopRequest:
    """Reason why the run was asked to end; None: it was not."""

    name: str | None = None


@contextmanager
def stop_signal(speaks: bool = True) -> Iterator[StopRequest]:
    """Action that SIGTERM and SIGINT (Ctrl-C) request; the second one has its default effect.

    ``speaks``: print on standard error what the first Ctrl-C does.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in _NAMES}
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if request.name is None:
            request.name, first = _NAMES[signal.Signals(number)], time.monotonic()
            if speaks and number == signal.SIGINT:
                os.write(
                    2,
                    b"Ctrl-C: the run ends once this step is finished and saved; again: at once\n",
                )
        elif time.monotonic() - first > _ECHO_S:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)

    for number in _NAMES:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
