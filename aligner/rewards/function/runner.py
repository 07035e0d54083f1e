"""Run a reward function over a batch, with a time limit and errors that name the sample.

Where it runs:

* A function named in the configuration (:meth:`RewardFunction.load`) runs in a **process of its
  own**, started once. When it does not answer in time that process is killed, with everything it
  started; nothing it does, a hanging C call or a crash included, stops the training process.
* A Python object given directly (:meth:`RewardFunction.wrap`) runs in a **thread**: it may hold
  a model or a connection that cannot travel. A thread cannot be killed: after a timeout it is
  left behind, never waited for, and ends with the program.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.child_process import ChildProcess, ProcessPool, Program
from aligner.config.fields import MOST_SECONDS
from aligner.errors import AlignerError, ConfigError, RewardError, RewardTimeoutError
from aligner.importing import describe_exception
from aligner.rewards.function.execution import LoadedFunction, Scored, failure_message
from aligner.rewards.protocol import Samples, Signature, parse_scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardOutput:
    """Scores of ``B`` samples."""

    rewards: Tensor  # float32 [B], finite
    metrics: dict[str, list[float]]  # key → B finite values, from functions that return dicts
    timeouts: int = 0  # samples for which the function did not answer in time


class _Runner(Protocol):
    """Calls of one function for several parts of a batch."""

    signature: Signature

    def begin(self, parts: Sequence[Samples], time_limit_s: float) -> list[Callable[[], Scored]]:
        """Begin to score all parts at the same time; they share one time limit.

        Returns the functions that wait for the scores of each part.
        """
        ...

    def close(self) -> None: ...


class RewardFunction:
    """A reward function, ready to score batches. Close it, or use it as a context manager."""

    def __init__(
        self,
        runner: _Runner,
        *,
        time_limit_s: float,
        max_concurrency: int,
        timeout_reward: float | None = None,
    ) -> None:
        """Use :meth:`load` or :meth:`wrap`."""
        if not 0 < time_limit_s <= MOST_SECONDS:
            raise ConfigError(
                f"reward.time_limit_s={time_limit_s} must be a positive number of seconds, at most "
                f"{MOST_SECONDS:g}"
            )
        if max_concurrency < 1:
            raise ConfigError(f"reward.max_concurrency={max_concurrency} must be at least 1")
        self._runner = runner
        self._timeout_s = time_limit_s
        self._max_concurrency = max_concurrency
        self._timeout_reward = timeout_reward

    @classmethod
    def load(
        cls,
        name: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        time_limit_s: float = 60.0,
        max_concurrency: int = 1,
        timeout_reward: float | None = None,
    ) -> "RewardFunction":
        """Load the function ``name`` into a process of its own.

        Args:
            name: ``package.module:function``, ``package.module.function`` or
                ``path/to/file.py:function``; sync or async.
            kwargs: further keyword arguments, the same in every call.
            time_limit_s: longest time for one batch.
            max_concurrency: score this many parts of a batch at the same time, each in a process
                of its own. With more than one the function sees parts, not the batch.
            timeout_reward: the reward of a sample for which the function does not answer in time;
                its further numbers are 0. None: `RewardTimeoutError`.

        Raises:
            ConfigError: it cannot be imported, or its signature does not fit.
        """
        return cls(
            ProcessRunner(name, kwargs or {}),
            time_limit_s=time_limit_s,
            max_concurrency=max_concurrency,
            timeout_reward=timeout_reward,
        )

    @classmethod
    def wrap(
        cls,
        function: Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        time_limit_s: float = 60.0,
        max_concurrency: int = 1,
    ) -> "RewardFunction":
        """Use a Python callable of this process; the arguments are those of :meth:`load`."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        runner = ThreadRunner(function, name, kwargs or {})
        return cls(runner, time_limit_s=time_limit_s, max_concurrency=max_concurrency)

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return self._runner.signature.name

    def check_columns(self, available: Collection[str]) -> None:
        """Refuse data without a column the function needs (DataError).

        ``available`` must include what the trainer adds, ``is_end`` and ``response_lengths``.
        """
        self._runner.signature.check_columns(available)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardOutput:
        """Score ``B`` samples; the arguments are those of the protocol.

        Raises:
            RewardError: the function raised, or returned the wrong number of values or something
                that is not a finite number; the message names function and sample.
            RewardTimeoutError: it did not answer within the time limit, and no reward is set for
                that.
            DataError: it needs a column that is not there.
        """
        samples = Samples(
            list(prompts),
            list(responses),
            list(ground_truths),
            {name: list(values) for name, values in (columns or {}).items()},
        )
        self.check_columns(samples.columns)
        if not len(samples):
            return RewardOutput(torch.zeros(0), {})
        answers = self._answers(samples)
        missing = [part for part, scored in answers if scored is None]
        if missing:
            log.warning(
                "reward function %r did not answer in time for %d of %d samples, the first %s; "
                "their reward is reward.timeout_reward=%g",
                self.name,
                sum(map(len, missing)),
                len(samples),
                missing[0].describe(0),
                self._timeout_reward,
            )
        return _join(answers, self.name, self._timeout_reward or 0.0)

    def close(self) -> None:
        """End the processes. A later call starts them again."""
        self._runner.close()

    def __enter__(self) -> "RewardFunction":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, samples: Samples) -> list[tuple[Samples, Scored | None]]:
        """Parts of the batch in order, each with its scores; None where none came in time.

        One sample that hangs takes its whole part with it. Such a part is scored again in halves,
        one after the other, until a single sample is left, for twice the time limit at most.
        A half is given four times as long as the last one that answered took.
        """
        answers: list[tuple[Samples, Scored | None]] = []
        waiting, limit = _split(samples, self._max_concurrency), self._timeout_s
        at_once, end = self._max_concurrency, math.inf
        while waiting:
            began = time.monotonic()
            if began >= end:
                answers += [(part, None) for part in waiting]
                break
            asked, waiting = waiting[:at_once], waiting[at_once:]
            scores = self._score(asked, min(limit, end - began))
            now = time.monotonic()
            for part, scored in zip(asked, scores, strict=True):
                if not isinstance(scored, RewardTimeoutError):
                    answers.append((part, scored))
                    if at_once == 1:
                        limit = min(self._timeout_s, max(1.0, 4 * (now - began)))
                elif self._timeout_reward is None:
                    raise scored
                elif len(part) == 1:
                    answers.append((part, None))
                else:
                    waiting += _split(part, 2)
            if waiting:
                at_once, end = 1, min(end, now + 2 * self._timeout_s)
        return sorted(answers, key=lambda answer: answer[0].offset)

    def _score(
        self, parts: list[Samples], time_limit_s: float
    ) -> list[Scored | RewardTimeoutError]:
        """Scores of each part, or the error if they did not come in time."""
        answers: list[Scored | RewardTimeoutError] = []
        try:
            for scores in self._runner.begin(parts, time_limit_s):
                try:
                    answers.append(scores())
                except RewardTimeoutError as error:
                    answers.append(error)
        except BaseException:  # an interrupt too: no answer may be left for the next batch
            self.close()
            raise
        return answers


def _split(samples: Samples, count: int) -> list[Samples]:
    """Contiguous parts, ``count`` at most, whose sizes differ by one at most."""
    count = min(count, len(samples))
    bounds = [len(samples) * part // count for part in range(count + 1)]
    return [samples.slice(*pair) for pair in pairwise(bounds)]


def _join(
    answers: list[tuple[Samples, Scored | None]], name: str, timeout_reward: float
) -> RewardOutput:
    keys: Iterable[str] = next((scored[1] for _, scored in answers if scored is not None), {})
    rewards: list[float] = []
    metrics: dict[str, list[float]] = {key: [] for key in keys}
    for part, scored in answers:
        missing = [timeout_reward] * len(part), {key: [0.0] * len(part) for key in metrics}
        part_rewards, part_metrics = missing if scored is None else scored
        if part_metrics.keys() != metrics.keys():
            raise RewardError(
                f"reward function {name!r} returned the keys {sorted(part_metrics)} for some "
                f"samples and {sorted(metrics)} for others"
            )
        rewards.extend(part_rewards)
        for key, values in part_metrics.items():
            metrics[key].extend(values)
    timeouts = sum(len(part) for part, scored in answers if scored is None)
    return RewardOutput(torch.tensor(rewards, dtype=torch.float32), metrics, timeouts)


class ProcessRunner(ProcessPool):
    """Processes, one for each part of a batch, which have imported the function."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Start the first process, so that a function that cannot be imported is refused now."""
        super().__init__(
            Program(
                "aligner.rewards.function.execution",
                (name, dict(kwargs)),
                f"reward function {name!r}",
                "raise reward.time_limit_s or make it faster",
                RewardError,
                RewardTimeoutError,
            )
        )
        self.signature = self._processes[0].parse(Signature.of_plain, self.loaded)
        self._kwargs = frozenset(kwargs)

    def begin(self, parts: Sequence[Samples], time_limit_s: float) -> list[Callable[[], Scored]]:
        """Send each part to a process of its own."""
        for error in self.start(range(len(parts))).values():
            raise error
        deadline = time.monotonic() + time_limit_s
        for slot, part in enumerate(parts):
            columns = self.signature.select(part.columns, self._kwargs)
            message = replace(part, columns=columns)
            self._processes[slot].ask(message, time_limit_s=time_limit_s)
        return [
            partial(self._scores, self._processes[slot], part, deadline, time_limit_s)
            for slot, part in enumerate(parts)
        ]

    def _scores(
        self, process: ChildProcess, samples: Samples, deadline: float, time_limit_s: float
    ) -> Scored:
        name = self.signature.name
        kind, payload = process.receive(deadline, time_limit_s)
        if kind == "scores":
            return process.parse(partial(parse_scores, samples=samples, name=name), payload)
        culprit = None  # in the child's second message, unless the search takes too long
        with suppress(RewardError):
            culprit = process.receive(deadline, 0.0)[1]
        known = culprit if culprit in range(len(samples)) else None
        raise RewardError(failure_message(name, str(payload), samples, known))


class ThreadRunner:
    """One daemon thread per part of a batch. A thread that hangs is left behind."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``; refuses a signature that does not fit."""
        self._function = LoadedFunction(function, name, kwargs)
        self.signature = self._function.signature

    def close(self) -> None:
        """Nothing is kept between batches."""

    def begin(self, parts: Sequence[Samples], time_limit_s: float) -> list[Callable[[], Scored]]:
        """Start a thread for each part."""
        deadline = time.monotonic() + time_limit_s
        waits: list[Callable[[], Scored]] = []
        for part in parts:
            future: Future[Scored] = Future()
            name = f"reward {self.signature.name}"
            arguments = (future, part, time_limit_s)
            threading.Thread(target=self._score, args=arguments, daemon=True, name=name).start()
            waits.append(partial(self._result, future, deadline, time_limit_s))
        return waits

    def _score(self, future: "Future[Scored]", part: Samples, time_limit_s: float) -> None:
        try:
            # A second more, so that the caller's own message comes first.
            future.set_result(self._function.score(part, limit_s=time_limit_s + 1))
        except AlignerError as error:
            future.set_exception(error)
        except BaseException as error:
            culprit = self._function.find_failing(part, error)
            raised = describe_exception(error)
            message = failure_message(self.signature.name, raised, part, culprit)
            future.set_exception(RewardError(message))

    def _result(self, future: "Future[Scored]", deadline: float, time_limit_s: float) -> Scored:
        wait([future], max(0.001, deadline - time.monotonic()))
        if not future.done():
            raise RewardTimeoutError(
                f"reward function {self.signature.name!r} did not answer within {time_limit_s:g} "
                "seconds and was left behind in its thread; raise reward.time_limit_s or make it "
                "faster"
            )
        return future.result()
