"""Call a reward function on some samples and find the sample it fails on.

In a process of `aligner.child_process`, messages are ``samples``; their answers are ``scores,
[{"reward": number, further numbers}, ...]``, or ``raised, text`` followed by ``culprit, index |
None``. This module imports neither torch nor numpy: every reward process loads it.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aligner.child_process import Answers
from aligner.errors import AlignerError
from aligner.importing import describe_exception, load_function
from aligner.rewards.protocol import Samples, Signature, parse_scores

Scored = tuple[list[float], dict[str, list[float]]]

# A function that failed on a batch is tried on this many single samples to find the culprit.
_MOST_TRIED = 256
_STARTING = threading.Lock()


def load(name: str, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[..., Answers]]:
    """Fields of the `Signature` of the function ``name``, and the function that answers messages.

    `aligner.child_process.serve` calls it in the reward process.
    """
    function = LoadedFunction(load_function(name, key="reward.function"), name, kwargs)
    return vars(function.signature), function.answers


class LoadedFunction:
    """A reward function with its kwargs, ready to be called."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``; refuses a signature that does not fit."""
        self.signature = Signature.of(function, name, kwargs)
        self._function = functools.partial(function, **kwargs)
        self._kwargs = frozenset(kwargs)
        self._runner = asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None  # of calls from other threads

    def score(self, samples: Samples, *, limit_s: float | None = None) -> Scored:
        """Call the function, wait if it is async, and check what it returned.

        ``limit_s`` cancels an async function; a sync one cannot be stopped from within.
        """
        columns = self.signature.select(samples.columns, self._kwargs)
        lists = [samples.prompts, samples.responses, samples.ground_truths]
        if self.signature.lists == 2:
            columns["ground_truths"] = lists.pop()
        result = self._function(*lists, **columns)
        if inspect.isawaitable(result):
            result = self._result_of(result, limit_s)
        return parse_scores(result, samples, self.signature.name)

    def answers(self, samples: Samples) -> Answers:
        """Scores of ``samples``, or what the function raised and for which sample."""
        try:
            rewards, metrics = self.score(samples)
        except (SystemExit, AlignerError):
            raise
        except BaseException as error:
            yield "raised", describe_exception(error)
            # After the answer: the search may take long, or hang.
            yield "culprit", self.find_failing(samples, error)
        else:
            rows = zip(rewards, *metrics.values(), strict=True)
            yield "scores", [dict(zip(["reward", *metrics], row, strict=True)) for row in rows]

    def _result_of(self, awaitable: Awaitable[Any], limit_s: float | None) -> Any:
        """Wait for it in one event loop for all calls: what the function holds may belong to it."""
        if threading.current_thread() is threading.main_thread():
            return self._runner.run(asyncio.wait_for(awaitable, limit_s))
        with _STARTING:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=(self._loop,), daemon=True).start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(awaitable, limit_s), loop)
        try:
            # A second more: a coroutine that can be cancelled is.
            return future.result(None if limit_s is None else limit_s + 1)
        finally:
            if not future.done():  # it holds the loop, which is left behind
                self._loop = None

    def find_failing(self, samples: Samples, error: BaseException) -> int | None:
        """Index of the first sample that fails by itself as the batch did, with ``error``.

        None if none of those tried does, or each does: then it is not the sample that is at fault.
        """
        culprit, others = None, len(samples) == 1
        for index in range(min(len(samples), _MOST_TRIED)):
            try:
                self.score(samples.slice(index, index + 1))
                others = True
            except BaseException as own:
                if type(own) is not type(error):
                    others = True
                elif culprit is None:
                    culprit = index
            if others and culprit is not None:
                return culprit
        return None


def failure_message(name: str, raised: str, samples: Samples, culprit: int | None) -> str:
    """Message that ``name`` raised, and on which sample."""
    where = "the batch as a whole; no single sample was found to cause it"
    if culprit is not None:
        where = samples.describe(culprit)
    return f"reward function {name!r} raised {raised} on {where}"


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(BaseException):  # SystemExit of a task, whose future has it as well
            loop.run_forever()
