"""Run a reward function over a batch, with a time limit and errors that name the sample.

batch ─► parts ─► a process or thread per part ─► scores, or a timeout ─► halves of the part, again

* A function named in the configuration (:meth:`RewardFunction.load`) runs in a **separate
  process**, started once. After a timeout the process is killed with its children. Hanging C calls
  and crashes do not stop the training process.
* A Python object (:meth:`RewardFunction.wrap`) runs in a **thread**, as it may contain a model or a
  connection that cannot be pickled. A thread cannot be killed: after a timeout it is abandoned, and
  ends with the program.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

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
    timeouts: int = 0  # number of samples without a result within the time limit


@dataclass(eq=False)
class RewardFunction(AbstractContextManager["RewardFunction"]):
    """Reward function that :meth:`load` or :meth:`wrap` returned. Close it, or use ``with``.

    Attributes:
        time_limit_s: time limit of a batch.
        max_concurrency: number of parts of a batch that are scored at the same time, each in a
            process. With more than one, the function gets parts instead of the batch.
        timeout_reward: reward of a sample after a timeout, with metrics of 0. None: raise
            `RewardTimeoutError`.
    """

    _runner: "ProcessRunner | ThreadRunner"
    _: KW_ONLY
    time_limit_s: float = 60.0
    max_concurrency: int = 1
    timeout_reward: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s <= MOST_SECONDS:
            raise ConfigError(
                f"reward.time_limit_s={self.time_limit_s} must be a positive number of seconds, at "
                f"most {MOST_SECONDS:g}"
            )
        if self.max_concurrency < 1:
            raise ConfigError(f"reward.max_concurrency={self.max_concurrency} must be at least 1")

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
        """Load a function into a separate process. ``kwargs`` are passed to every call.

        ``name``: ``package.module:function``, ``package.module.function`` or
        ``path/to/file.py:function``, sync or async.

        Raises:
            ConfigError: the function cannot be imported, or its signature does not fit.
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
        """Use a Python callable of this process. The arguments are those of :meth:`load`."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        runner = ThreadRunner(function, name, kwargs or {})
        return cls(runner, time_limit_s=time_limit_s, max_concurrency=max_concurrency)

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return self._runner.signature.name

    @property
    def form(self) -> str:
        """Name of the form of another library, empty for a function of the protocol."""
        return self._runner.signature.form

    def check_columns(self, available: Collection[str]) -> None:
        """Raise `DataError` for data without a column that the function requires.

        ``available`` must include the trainer's columns ``is_end`` and ``response_lengths``.
        """
        self._runner.signature.check_columns(available)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardOutput:
        """Score ``B`` samples. The arguments are those of the protocol.

        Raises:
            RewardError: the function raised, or returned a wrong number of values or a value that
                is not a finite number. The message names function and sample.
            RewardTimeoutError: the function exceeded the time limit, and ``timeout_reward`` is
                None.
            DataError: the function requires a column that is missing.
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
        # Score the batch, and report timeouts.
        answers = self._answers(samples)
        missing = [part for part, scored in answers if scored is None]
        if missing:
            log.warning(
                "reward function %r did not answer in time for %d of %d samples, the first %s. "
                "Their reward is reward.timeout_reward=%g",
                self.name,
                sum(map(len, missing)),
                len(samples),
                missing[0].describe(0),
                self.timeout_reward,
            )
        return _join(answers, self.name, self.timeout_reward or 0.0)

    def close(self) -> None:
        """End the processes. A later call starts them again."""
        self._runner.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, samples: Samples) -> list[tuple[Samples, Scored | None]]:
        """Return the parts of the batch in order with their scores, None after a timeout.

        A sample that hangs affects its whole part. After a timeout, the part is scored again in
        halves, sequentially, down to single samples, within twice the time limit. The limit of a
        half is four times the duration of the last part that succeeded.
        """
        answers: list[tuple[Samples, Scored | None]] = []
        waiting, limit = _split(samples, self.max_concurrency), self.time_limit_s
        concurrency, end = self.max_concurrency, math.inf
        while waiting:
            # Score the next parts, or give up at the end of the time.
            began = time.monotonic()
            if began >= end:
                answers += [(part, None) for part in waiting]
                break
            parts, waiting = waiting[:concurrency], waiting[concurrency:]
            scores = self._score(parts, min(limit, end - began))
            now = time.monotonic()
            # Keep the scores, and halve the parts that timed out.
            for part, scored in zip(parts, scores, strict=True):
                if not isinstance(scored, RewardTimeoutError):
                    answers.append((part, scored))
                    if concurrency == 1:
                        limit = min(self.time_limit_s, max(1.0, 4 * (now - began)))
                elif self.timeout_reward is None:
                    raise scored
                elif len(part) == 1:
                    answers.append((part, None))
                else:
                    waiting += _split(part, 2)
            if waiting:
                concurrency, end = 1, min(end, now + 2 * self.time_limit_s)
        return sorted(answers, key=lambda answer: answer[0].offset)

    def _score(
        self, parts: list[Samples], time_limit_s: float
    ) -> list[Scored | RewardTimeoutError]:
        """Return the scores of each part, or the error after a timeout."""
        answers: list[Scored | RewardTimeoutError] = []
        try:
            for scores in self._runner.begin(parts, time_limit_s):
                try:
                    answers.append(scores())
                except RewardTimeoutError as error:
                    answers.append(error)
        except BaseException:  # also an interrupt: the next batch must not read these answers
            self.close()
            raise
        return answers


def _split(samples: Samples, count: int) -> list[Samples]:
    """Split into at most ``count`` contiguous parts, whose sizes differ by at most one."""
    count = min(count, len(samples))
    bounds = [len(samples) * part // count for part in range(count + 1)]
    return [samples.slice(*pair) for pair in pairwise(bounds)]


def _join(
    answers: list[tuple[Samples, Scored | None]], name: str, timeout_reward: float
) -> RewardOutput:
    keys: Iterable[str] = next((scored[1] for _, scored in answers if scored is not None), {})
    # The parts must agree on the metrics, which are unknown for parts after a timeout.
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
    """A process for each part of a batch, each with the function imported."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Start the first process, so that an invalid function is refused now."""
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
        """Send each part to a separate process, with a common time limit.

        Returns, for each part, a function that waits for its scores.
        """
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
        # The child checks the scores, too, but its messages are not trusted.
        name = self.signature.name
        kind, payload = process.receive(deadline, time_limit_s)
        if kind == "scores":
            return process.parse(partial(parse_scores, samples=samples, name=name), payload)
        culprit = None  # in the child's second message, unless the search takes too long
        with suppress(RewardError):
            culprit = process.receive(deadline, 0.0)[1]
        culprit = culprit if culprit in range(len(samples)) else None
        raise RewardError(failure_message(name, str(payload), samples, culprit))


class ThreadRunner:
    """A daemon thread for each part of a batch. A thread that hangs is abandoned."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``, or refuse a signature that does not fit."""
        self._function = LoadedFunction(function, name, kwargs)
        self.signature = self._function.signature

    def close(self) -> None:
        """Do nothing, as no thread is reused."""

    def begin(self, parts: Sequence[Samples], time_limit_s: float) -> list[Callable[[], Scored]]:
        """Start a thread for each part. Returns the functions that wait for the scores."""
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
                "seconds, and its thread was abandoned. Raise reward.time_limit_s or make it faster"
            )
        return future.result()
