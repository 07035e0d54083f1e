"""The reward process: loads the function once, then scores what its parent sends.

Messages are pickled tuples. Parent → child: first ``(function name, kwargs)``, then
``(number, Samples, time limit in seconds)``. Child → parent: ``(number, kind, payload)`` with the
number of the batch that is answered (0 before the first), where kind and payload are
``"ready", Signature``; ``"scores", (rewards, metrics)``; ``"refused", (name of an AlignerError,
text)``; or ``"raised", text`` followed by ``"culprit", index | None``.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from aligner.errors import AlignerError
from aligner.importing import describe_exception, text_of
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.function.process_tree import adopt_orphans, kill_tree
from aligner.rewards.protocol import Samples


def main(channel: int) -> None:
    """Serve on the inherited socket ``channel`` until the parent closes it or is gone."""
    adopt_orphans()
    _die_with_parent()
    connection = Connection(channel)
    own = os.getpid()

    def send(number: int, kind: str, payload: Any) -> None:
        if os.getpid() != own:  # the function forked, and returned in the copy as well
            os._exit(0)
        connection.send((number, kind, payload))

    try:
        function = LoadedFunction.load(*connection.recv())
    except AlignerError as error:
        send(0, *_refusal(error))
        return
    send(0, "ready", function.signature)
    while True:
        try:
            number, samples, limit_s = connection.recv()
        except EOFError:
            return
        # The parent kills this process at the limit. If it is gone too, and the function hangs
        # without ever letting another Python thread run, this timer (a C thread) still ends it.
        faulthandler.dump_traceback_later(limit_s + 5, exit=True)
        for kind, payload in _answer(function, samples):
            send(number, kind, payload)
        faulthandler.cancel_dump_traceback_later()


def _answer(function: LoadedFunction, samples: Samples) -> Iterator[tuple[str, Any]]:
    try:
        answer: tuple[str, Any] = "scores", function.score(samples)
    except SystemExit:
        raise
    except AlignerError as error:
        answer = _refusal(error)
    except BaseException as error:
        answer = "raised", describe_exception(error)
    yield answer
    if answer[0] == "raised":  # after the answer: the search may take long, or hang
        yield "culprit", function.find_failing(samples)


def _refusal(error: AlignerError) -> tuple[str, tuple[str, str]]:
    """Error by name and text: the class of an error need not be one that the parent can import."""
    return "refused", (type(error).__name__, text_of(error))


def _die_with_parent() -> None:
    """End this process and all it started once the parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
