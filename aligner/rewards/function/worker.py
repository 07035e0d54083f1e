"""The reward process: loads the function once, then scores what its parent sends.

Messages are those of `aligner.child_process`. Parent to child: first ``(function name, kwargs)``,
then ``(number, Samples, time limit in seconds)``. Child to parent: ``ready, Signature``; ``scores,
(rewards, metrics)``; or ``raised, text`` followed by ``culprit, index | None``.
"""

from collections.abc import Iterator
from typing import Any

from aligner.child_process import Channel, ended_after, refusal
from aligner.errors import AlignerError
from aligner.importing import describe_exception
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.protocol import Samples


def main(channel: int) -> None:
    """Serve on the inherited socket ``channel`` until the parent closes it or is gone."""
    parent = Channel(channel)
    try:
        function = LoadedFunction.load(*parent.receive())
    except AlignerError as error:
        parent.send(0, *refusal(error))
        return
    parent.send(0, "ready", function.signature)
    while True:
        try:
            number, samples, limit_s = parent.receive()
        except EOFError:
            return
        with ended_after(limit_s):
            for kind, payload in _answer(function, samples):
                parent.send(number, kind, payload)


def _answer(function: LoadedFunction, samples: Samples) -> Iterator[tuple[str, Any]]:
    try:
        answer: tuple[str, Any] = "scores", function.score(samples)
    except SystemExit:
        raise
    except AlignerError as error:
        answer = refusal(error)
    except BaseException as error:
        answer = "raised", describe_exception(error)
    yield answer
    if answer[0] == "raised":  # after the answer: the search may take long, or hang
        yield "culprit", function.find_failing(samples)
