"""Reward functions in processes of their own, which can be killed when they hang."""

import json
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from aligner import errors
from aligner.errors import AlignerError, RewardError, RewardTimeoutError
from aligner.rewards.function.execution import Scored, failure_message, in_time
from aligner.rewards.function.process_tree import kill_tree
from aligner.rewards.protocol import Samples, Signature

# Importing the function's module is not part of its time limit, but must end some time.
_START_LIMIT_S = 300.0
_MOST_BYTES = 2**30  # of one answer

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from aligner.rewards.function.worker import main; main(int(sys.argv[2]))"
)


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
                child.send(part, time_limit_s)
            return [
                in_time(partial(child.receive, part, deadline, time_limit_s))
                for child, part in pairs
            ]
        except BaseException:  # an interrupt too: no answer may be left for the next batch
            self.close()
            raise

    def close(self) -> None:
        """Kill all children."""
        for child in self._children:
            child.close()


class RewardProcess:
    """One child process that has imported one reward function.

    Not ``multiprocessing.Process``: spawn would import the training script again, and fork does
    not survive the threads of torch. Whatever the child starts is killed with it, and it ends by
    itself when this process is gone. Messages carry the number of their batch: what a function that
    forks answers twice is no answer to the next one.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Start the child and wait until it has imported the function ``name``."""
        self._name = name
        self._number = 0  # of the batch that was sent last
        self._connection, channel = Pipe()
        with channel:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(channel.fileno())],
                pass_fds=[channel.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._stop = weakref.finalize(self, _kill, self._child, self._connection, os.getpid())
        self._connection.send((name, dict(kwargs)))
        kind, payload = self._receive(time.monotonic() + _START_LIMIT_S, _START_LIMIT_S)
        if kind == "refused":
            self.close()
            raise _refusal(*payload)
        self.signature: Signature = payload

    @property
    def alive(self) -> bool:
        """True if it can take another batch."""
        return self._stop.alive and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def send(self, samples: Samples, time_limit_s: float) -> None:
        """Hand over a batch; ``receive`` must follow."""
        self._number += 1
        try:
            self._connection.send((self._number, samples, time_limit_s))
        except OSError as error:
            raise self._died() from error

    def receive(self, samples: Samples, deadline: float, time_limit_s: float) -> Scored:
        """Wait for the scores of the batch that was sent.

        Args:
            samples: that batch, to name a sample in it.
            deadline: ``time.monotonic()`` at which the wait ends.
            time_limit_s: the time limit that ``deadline`` came from, for the message.
        """
        kind, payload = self._receive(deadline, time_limit_s)
        if kind == "scores":
            scored: Scored = payload
            return scored
        if kind == "refused":
            raise _refusal(*payload)
        culprit = self._receive_culprit(deadline)
        raise RewardError(failure_message(self._name, payload, samples, culprit))

    def close(self) -> None:
        """Kill the child and everything it started. May be called twice."""
        self._stop()

    def _receive_culprit(self, deadline: float) -> int | None:
        """The child's second message, unless the search takes longer than the time limit."""
        try:
            index: int | None = self._receive(deadline, 0.0)[1]
        except RewardError:
            return None
        return index

    def _receive(self, deadline: float, time_limit_s: float) -> tuple[str, Any]:
        """Kind and payload of the next answer to the batch that was sent last."""
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise RewardTimeoutError(
                        f"reward function {self._name!r} did not answer within {time_limit_s:g} "
                        "seconds and was killed; raise reward.time_limit_s or make it faster"
                    )
                message = self._connection.recv_bytes(_MOST_BYTES)
            except (EOFError, OSError) as error:
                if isinstance(error, AlignerError):
                    raise
                raise self._died() from error
            try:
                number, kind, payload = pickle.loads(message)
            except Exception as error:  # damaged pickles raise nearly anything
                self.close()
                raise RewardError(
                    f"the process of reward function {self._name!r} sent what is no answer "
                    f"({type(error).__name__}); does the function write to file descriptors that "
                    "it did not open?"
                ) from error
            if number == self._number:
                return kind, payload

    def _died(self) -> RewardError:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        code = self._child.returncode
        self.close()
        return RewardError(
            f"the process of reward function {self._name!r} died (exit code {code}); its output "
            "is above"
        )


def _kill(child: "subprocess.Popen[bytes]", connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours is ending: the child is not its own
        return
    connection.close()
    kill_tree(child.pid)
    child.wait()


def _refusal(name: str, text: str) -> AlignerError:
    kind = getattr(errors, name, RewardError)
    return kind(text) if issubclass(kind, AlignerError) else RewardError(text)
