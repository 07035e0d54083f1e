"""Calls of a reward function, and the search for the sample on which it fails.

In a process of `aligner.child_process`, a message is ``samples``. Its answer is ``scores,
[{"reward": number, metrics}, ...]``, or ``raised, text`` followed by ``culprit, index | None``.
Every reward process loads this module, so it imports neither torch nor numpy.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aligner.child_process import Answers
from aligner.errors import AlignerError
from aligner.importing import describe_exception, load_function
from aligner.rewards.forms import of_form
from aligner.rewards.protocol import Samples, Signature, parse_scores

Scored = tuple[list[float], dict[str, list[float]]]

# Maximum number of single samples in the search after a batch has failed.
_MAX_SEARCHED = 256
_LOOP_LOCK = threading.Lock()


def load(name: str, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[..., Answers]]:
    """Return the fields of the function's `Signature`, and the function that answers messages.

    `aligner.child_process.serve` calls this function in the reward process.
    """
    function = LoadedFunction(load_function(name, key="reward.function"), name, kwargs)
    return vars(function.signature), function.answers


class LoadedFunction:
    """A reward function with its kwargs, ready to be called."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``, or refuse a signature that does not fit."""
        form, self._function = of_form(function, functools.partial(function, **kwargs))
        signature = Signature.of(function if form is None else self._function, name, kwargs)
        self.signature = replace(signature, form="" if form is None else form.name)
        self._kwargs = frozenset(kwargs)
        self._runner = asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None  # for calls from other threads

    def score(self, samples: Samples, *, limit_s: float | None = None) -> Scored:
        """Call the function, wait for the result if it is async, and check the result.

        An async function is cancelled after ``limit_s``. A sync function cannot be stopped here.
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
        """Yield the scores of ``samples``, or the function's exception and the failing sample."""
        try:
            rewards, metrics = self.score(samples)
        except (SystemExit, AlignerError):
            raise
        except BaseException as error:
            yield "raised", describe_exception(error)
            # After the answer, as the search may take long or hang.
            yield "culprit", self.find_failing(samples, error)
        else:
            rows = zip(rewards, *metrics.values(), strict=True)
            yield "scores", [dict(zip(["reward", *metrics], row, strict=True)) for row in rows]

    def _result_of(self, awaitable: Awaitable[Any], limit_s: float | None) -> Any:
        """Run a coroutine in one event loop for all calls, as the function may keep its objects."""
        if threading.current_thread() is threading.main_thread():
            return self._runner.run(asyncio.wait_for(awaitable, limit_s))
        with _LOOP_LOCK:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=(self._loop,), daemon=True).start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(awaitable, limit_s), loop)
        try:
            # A second more, for the cancellation.
            return future.result(None if limit_s is None else limit_s + 1)
        finally:
            if not future.done():  # it blocks the loop, which is abandoned
                self._loop = None

    def find_failing(self, samples: Samples, error: BaseException) -> int | None:
        """Return the index of the first sample that alone fails with the type of ``error``.

        None if no sample does, or if all do, so that no sample is the cause.
        """
        culprit, has_other_results = None, len(samples) == 1
        for index in range(min(len(samples), _MAX_SEARCHED)):
            try:
                self.score(samples.slice(index, index + 1))
                has_other_results = True
            except BaseException as sample_error:
                if type(sample_error) is not type(error):
                    has_other_results = True
                elif culprit is None:
                    culprit = index
            # A sample is only the cause if another sample succeeds or fails differently.
            if has_other_results and culprit is not None:
                return culprit
        return None


def failure_message(name: str, raised: str, samples: Samples, culprit: int | None) -> str:
    """Return the message for an exception of the function ``name`` and the failing sample."""
    subject = "the batch as a whole, and no single sample was found to cause it"
    if culprit is not None:
        subject = samples.describe(culprit)
    return f"reward function {name!r} raised {raised} on {subject}"


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(BaseException):  # SystemExit of a task, which its future also raises
            loop.run_forever()
