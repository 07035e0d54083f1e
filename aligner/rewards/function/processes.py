"""Reward functions in processes of their own, which can be killed when they hang."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aligner.child_process import ChildProcess, Wording
from aligner.errors import RewardError, RewardTimeoutError
from aligner.rewards.function.execution import Scored, failure_message, in_time
from aligner.rewards.protocol import Samples, Signature

_WORKER = "aligner.rewards.function.worker"


class ProcessRunner:
    """Children, one for each part of a batch, started when first needed and then kept."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Start the first child, so that a function that cannot be imported is refused now."""
        self._name = name
        self._kwargs = dict(kwargs)
        self._children = [RewardProcess(name, kwargs)]
        self.signature: Signature = self._children[0].signature

    def score(self, parts: list[Samples], time_limit_s: float) -> list[Scored | RewardTimeoutError]:
        """Score all parts at the same time; they share one time limit.

        A part that does not answer in time gets an error in place of scores.
        """
        self._children = [child for child in self._children if child.alive]
        while len(self._children) < len(parts):
            self._children.append(RewardProcess(self._name, self._kwargs))
        pairs = list(zip(self._children, parts, strict=False))
        deadline = time.monotonic() + time_limit_s
        try:
            for child, part in pairs:
                child.ask(part, time_limit_s=time_limit_s)
            return [
                in_time(partial(child.scores, part, deadline, time_limit_s))
                for child, part in pairs
            ]
        except BaseException:  # an interrupt too: no answer may be left for the next batch
            self.close()
            raise

    def close(self) -> None:
        """Kill all children."""
        for child in self._children:
            child.close()


class RewardProcess(ChildProcess):
    """One child process that has imported one reward function."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Start the child and wait until it has imported the function ``name``."""
        self._name = name
        wording = Wording(
            f"reward function {name!r}",
            "raise reward.time_limit_s or make it faster",
            RewardError,
            RewardTimeoutError,
        )
        super().__init__(_WORKER, (name, dict(kwargs)), wording)
        self.signature: Signature = self.wait_until_ready()

    def scores(self, samples: Samples, deadline: float, time_limit_s: float) -> Scored:
        """Wait for the scores of the batch that was sent.

        Args:
            samples: that batch, to name a sample in it.
            deadline: ``time.monotonic()`` at which the wait ends.
            time_limit_s: the time limit that ``deadline`` came from, for the message.
        """
        kind, payload = self.receive(deadline, time_limit_s)
        if kind == "scores":
            scored: Scored = payload
            return scored
        culprit = self._receive_culprit(deadline)
        raise RewardError(failure_message(self._name, payload, samples, culprit))

    def _receive_culprit(self, deadline: float) -> int | None:
        """The child's second message, unless the search takes longer than the time limit."""
        try:
            index: int | None = self.receive(deadline, 0.0)[1]
        except RewardError:
            return None
        return index
