"""The reward process: loads the function once, then scores what its parent sends.

Messages are pickled tuples. Parent → child: first ``(function name, kwargs)``, then
``(Samples, time limit in seconds)``. Child → parent: ``("ready", Signature)``,
``("scores", (rewards, metrics))``, ``("refused", AlignerError)``, or ``("raised", text)`` followed
by ``("culprit", index | None)``.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from aligner.errors import AlignerError
from aligner.rewards.execution import LoadedFunction, describe_exception
from aligner.rewards.protocol import Samples


def main(channel: int) -> None:
    """Serve on the inherited socket ``channel`` until the parent closes it or is gone."""
    _die_with_parent()
    connection = Connection(channel)
    try:
        function = LoadedFunction.load(*connection.recv())
    except AlignerError as error:
        connection.send(("refused", error))
        return
    connection.send(("ready", function.signature))
    while True:
        try:
            samples, limit_s = connection.recv()
        except EOFError:
            return
        # The parent kills this process at the limit. If it is gone too, and the function hangs
        # without ever letting another Python thread run, this timer (a C thread) still ends it.
        faulthandler.dump_traceback_later(limit_s + 5, exit=True)
        for message in _answer(function, samples):
            connection.send(message)
        faulthandler.cancel_dump_traceback_later()


def _answer(function: LoadedFunction, samples: Samples) -> Iterator[tuple[str, Any]]:
    try:
        yield "scores", function.score(samples)
    except AlignerError as error:
        yield "refused", error
    except Exception as error:
        yield "raised", describe_exception(error)  # first: the search may take long, or hang
        yield "culprit", function.find_failing(samples)


def _die_with_parent() -> None:
    """End this process and all it started once the parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
