"""Reward functions in threads of this process: for objects that cannot travel."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aligner.errors import AlignerError, RewardError, RewardTimeoutError
from aligner.importing import describe_exception
from aligner.rewards.function.execution import LoadedFunction, Scored, failure_message, in_time
from aligner.rewards.protocol import Samples, Signature


class ThreadRunner:
    """One daemon thread per part of a batch. A thread that hangs is left behind."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``; refuses a signature that does not fit."""
        self._function = LoadedFunction(function, name, kwargs)
        self.signature: Signature = self._function.signature

    def score(self, parts: list[Samples], time_limit_s: float) -> list[Scored | RewardTimeoutError]:
        """Score all parts at the same time; see `ProcessRunner.score`."""
        deadline = time.monotonic() + time_limit_s
        replies = [self._start(part, time_limit_s) for part in parts]
        return [in_time(partial(self._result, reply, deadline, time_limit_s)) for reply in replies]

    def close(self) -> None:
        """Nothing is kept between batches."""

    def _start(
        self, part: Samples, time_limit_s: float
    ) -> "queue.SimpleQueue[Scored | AlignerError]":
        reply: queue.SimpleQueue[Scored | AlignerError] = queue.SimpleQueue()

        def run() -> None:
            try:
                # A second more, so that the caller's own message comes first.
                reply.put(self._function.score(part, limit_s=time_limit_s + 1))
            except AlignerError as error:
                reply.put(error)
            except BaseException as error:
                culprit = self._function.find_failing(part)
                raised = describe_exception(error)
                message = failure_message(self.signature.name, raised, part, culprit)
                reply.put(RewardError(message))

        threading.Thread(target=run, daemon=True, name=f"reward {self.signature.name}").start()
        return reply

    def _result(
        self,
        reply: "queue.SimpleQueue[Scored | AlignerError]",
        deadline: float,
        time_limit_s: float,
    ) -> Scored:
        try:
            result = reply.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            raise RewardTimeoutError(
                f"reward function {self.signature.name!r} did not answer within {time_limit_s:g} "
                "seconds and was left behind in its thread; raise reward.time_limit_s or make it "
                "faster"
            ) from None
        if isinstance(result, AlignerError):
            raise result
        return result
