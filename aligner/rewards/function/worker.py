"""The reward process: loads the function once, then scores what its parent sends.

Messages are those of `aligner.child_process`. Parent to child: first ``(function name, kwargs)``,
then ``(number, Samples, time limit in seconds)``. Child to parent: ``ready`` with the fields of a
`Signature`; ``scores, [{"reward": number, further numbers}, ...]``; or ``raised, text`` followed by
``culprit, index | None``.
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
    parent.send(0, "ready", vars(function.signature))
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
        rewards, metrics = function.score(samples)
    except SystemExit:
        raise
    except AlignerError as error:
        yield refusal(error)
    except BaseException as error:
        yield "raised", describe_exception(error)
        # After the answer: the search may take long, or hang.
        yield "culprit", function.find_failing(samples, error)
    else:
        rows = zip(rewards, *metrics.values(), strict=True)
        yield "scores", [dict(zip(["reward", *metrics], row, strict=True)) for row in rows]
