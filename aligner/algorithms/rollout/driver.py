"""Driver of a rollout's conversations with environments: a thread on rank 0.

    process pool ─ answers ─► driver thread ─ rows to continue ─► JobQueue ─► main thread, engine
         ▲                      │      ▲                                            │
         └──────── calls ───────┘      └──────────────── tokens ────────────────────┘

A conversation occupies one slot of the process pool. Random numbers depend only on the seed, the
sample and the attempt, so sampled tokens do not depend on timing. For slow conversations, the
engine delays a batch by at most `ConversationRollouts.gather_s`.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, cast

from aligner.config import EnvironmentConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import Call, CallAnswer, EnvironmentPool, Failure
from aligner.environments.trajectory import Trajectory
from aligner.errors import AlignerError, EnvironmentCallError
from aligner.generation.rows import Progress, Row, RowJob
from aligner.http.queue import JobQueue

if TYPE_CHECKING:
    from aligner.serving.sessions import Session

log = logging.getLogger(__name__)

_POLL_S = 0.05  # seconds between two checks of the time limits
_MAX_JOIN_S = 30.0

# A conversation is a generator. It yields a `Call` of its process, or a `Row` of tokens that the
# engine continues. The driver sends the call's result or the row's `Progress` to the generator, or
# throws `ConversationFailedError`. The generator returns the trajectory (None if the policy never
# answered) and the failure that ended the conversation, if any.
Steps = Generator[Call | Row, Any, tuple[Trajectory | None, Failure | None]]


class ConversationFailedError(Exception):
    """A call of an environment's process or of the engine failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass
class Episode:
    """State of one row of a rollout, until the row's conversation ends. Times are monotonic."""

    row: int
    sample_id: int
    seed: int  # seed of the environment
    columns: dict[str, Any]
    failures: list[str] = field(default_factory=list)  # reasons of failed attempts
    slot: int = -1
    steps: Steps = field(init=False)
    call: Call | None = None
    session: "Session | None" = None  # requests of an agent's process to the policy
    job: RowJob | None = None
    reply: Progress | Exception | None = None
    checked_at: float = 0.0
    silent_s: float = 0.0  # seconds since the call began or the policy last answered
    used_s: float = 0.0  # seconds of all calls, without waiting for the policy
    answers: int = 0  # number of answers in the session at the last check

    @property
    def attempt(self) -> int:
        """Index of the attempt, for random numbers. Attempts with engine errors do not count."""
        return sum(reason != "engine_error" for reason in self.failures)


class Driver:
    """Driver of a rollout's conversations, on rank 0. ``conduct`` begins an attempt (`Steps`)."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool | None,
        queue: JobQueue[Row],
        conduct: Callable[[Episode], Steps],
    ) -> None:
        self._config, self._pool = config, cast(EnvironmentPool, pool)  # None on other ranks
        self._queue, self._conduct = queue, conduct
        self._waiting, self._active = deque[Episode](), list[Episode]()
        self._free_slots = deque(range(config.concurrency))
        self._ended: dict[int, Trajectory] = {}
        self._failures: list[Failure] = []
        self._stopping = threading.Event()
        self.is_over = False  # True after all conversations have ended or the rollout has failed
        self._error: Exception | None = None
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="conversations", daemon=True)

    def is_complete(self, rows: int) -> bool:
        """Return whether ``rows`` queued rows include a row of every running conversation."""
        unfinished = len(self._active) + len(self._waiting)
        return rows >= min(self._config.concurrency, unfinished)

    def start(self, data: BatchedDataDict, seed: int, per_prompt: int) -> None:
        """Start a conversation for each row of ``data``.

        ``per_prompt``: number of adjacent rows whose environments have the same seed.
        """
        for row, sample_id in enumerate(data["sample_ids"].tolist()):
            prompt_seed = random.Random(f"{seed}/{sample_id // per_prompt}").getrandbits(63)
            self._waiting.append(Episode(row, sample_id, prompt_seed, data["columns"][row]))
        self._thread.start()

    def stop(self) -> None:
        """End the running conversations and the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._wake_writer.send_bytes(b"\0")
            self._thread.join(_MAX_JOIN_S)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories in order of rows. Raises if the rollout failed.

        Raises `EnvironmentCallError` if every conversation ended normally, but none has a reward.
        """
        if self._error is not None:
            raise self._error
        trajectories = [self._ended[row] for row in sorted(self._ended)]
        # Without any reward, no advantage can be computed.
        if trajectories and not any(trajectory.is_scored for trajectory in trajectories):
            text = (
                f"environment {self._pool.factory!r} scored none of the {len(trajectories)} "
                "conversations of a rollout: "
            )
            if all(trajectory.end_reason == "done" for trajectory in trajectories):
                raise EnvironmentCallError(
                    f"{text}every reward was None. Return a number as the reward of a turn"
                )
            keys = "environment.max_turns, environment.max_tokens, environment.failed"
            log.warning("%sconversations ended at a limit or with a failure (%s)", text, keys)
        return trajectories

    def _run(self) -> None:
        """Conduct all conversations. This is the main function of the thread."""
        try:
            while (self._waiting or self._active) and not self._stopping.is_set():
                self._fill_slots()
                self._poll()
        except Exception as error:
            self._error = error
        finally:
            for episode in self._active:
                episode.steps.close()
                self._pool.kill(episode.slot)
            self.is_over = True
            self._queue.wake()

    def _fill_slots(self) -> None:
        starting = []
        while self._waiting and self._free_slots:
            episode = self._waiting[0]
            episode.slot, episode.used_s = self._free_slots.popleft(), 0.0
            episode.steps = self._conduct(episode)
            starting.append(episode)
            # Append first: `is_complete` in the engine's thread must not miss an episode.
            self._active.append(episode)
            self._waiting.popleft()
        self._resume([(episode, None) for episode in starting])

    def _poll(self) -> None:
        """Wait briefly for replies, and resume the conversations that have a reply or a failure."""
        calling = [episode.slot for episode in self._active if episode.call is not None]
        answered = self._pool.answered(calling, _POLL_S, self._wake_reader)
        while self._wake_reader.poll():
            self._wake_reader.recv_bytes()
        now = time.monotonic()
        ready = []
        for episode in self._active:
            reply: CallAnswer | Progress | Failure | Exception | None = episode.reply
            if episode.call is not None:
                reply = self._reply_of_process(episode, episode.slot in answered, now)
            elif isinstance(reply, Exception):
                # Without a failure the queue was closed, because the rollout is over.
                assert episode.job is not None
                reply = episode.job.failure
            if reply is not None:
                ready.append((episode, reply))
        self._resume(ready)

    def _reply_of_process(
        self, episode: Episode, is_answered: bool, now: float
    ) -> CallAnswer | Failure | None:
        """Return the result of the episode's call, or a failure, or None if the call is running."""
        assert episode.call is not None
        # Measure the time of the call. Time in which an agent waits for the policy does not count.
        elapsed_s, episode.checked_at = now - episode.checked_at, now
        session = episode.session
        answers = 0 if session is None else len(session.answers)
        if session is not None and (session.is_waiting or answers != episode.answers):
            episode.silent_s, episode.answers = 0.0, answers
        else:
            episode.silent_s += elapsed_s
            episode.used_s += elapsed_s
        # A failure of the engine takes precedence, because an agent may catch it and return.
        failure = None if session is None else session.engine_failure
        if failure is None and is_answered:
            return self._pool.receive(episode.call, now)
        # Kill the process of a call that failed or took too long.
        limits, excess = self._config, ""
        if episode.silent_s > limits.timeout_s:
            event = "did not answer" if session is None else "neither called the policy nor ended"
            excess = f"{event} within environment.timeout_s={limits.timeout_s:g} seconds"
        elif episode.used_s > limits.total_timeout_s:
            excess = (
                f"took more than environment.total_timeout_s={limits.total_timeout_s:g} seconds "
                "(without time spent waiting for the policy)"
            )
        if excess and failure is None:
            remedy = "Raise the limit, or make the environment faster"
            failure = Failure("env_timeout", f"{self._pool.name} {excess} and was killed. {remedy}")
        if failure is not None:
            self._pool.kill(episode.slot)
        return failure

    def _resume(
        self, replies: Sequence[tuple[Episode, CallAnswer | Progress | Failure | None]]
    ) -> None:
        """Send each reply to its conversation, which runs until its next request or its end."""
        # Queue requests for sampling immediately, but collect the calls of processes.
        calling: list[tuple[Episode, Call]] = []
        for episode, reply in replies:
            episode.call = episode.job = episode.reply = None
            try:
                if isinstance(reply, Failure):
                    request = episode.steps.throw(ConversationFailedError(reply))
                else:
                    value = reply.value if isinstance(reply, CallAnswer) else reply
                    request = episode.steps.send(value)
            except StopIteration as end:
                self._end(episode, *end.value)
            except ConversationFailedError as error:
                self._end(episode, None, error.failure)
            else:
                if isinstance(request, Call):
                    calling.append((episode, request))
                else:
                    self._submit(episode, request)
        # Begin all calls together, so that missing processes start at the same time.
        failures = self._pool.begin([call for _, call in calling])
        failed: list[tuple[Episode, Failure]] = []
        for (episode, episode.call), failure in zip(calling, failures, strict=True):
            episode.checked_at, episode.silent_s = time.monotonic(), 0.0
            if isinstance(failure, Failure):
                failed.append((episode, failure))
        if failed:
            self._resume(failed)

    def _submit(self, episode: Episode, row: Row) -> None:
        def report(event: Progress | Exception) -> None:  # in the engine's thread
            episode.reply = event
            self._wake_writer.send_bytes(b"\0")

        episode.job = RowJob([row], report)
        is_queued = self._queue.add(episode.job)
        assert is_queued, "the queue must have room for one row of each slot"

    def _end(
        self, episode: Episode, trajectory: Trajectory | None, failure: Failure | None
    ) -> None:
        """Store the trajectory, or queue the conversation for another attempt."""
        self._free_slots.append(episode.slot)
        if failure is not None:
            episode.failures.append(failure.reason)
            turns = 0 if trajectory is None else len(trajectory.turns)
            if not self._becomes_sample(failure, turns):
                self._waiting.append(episode)
                self._active.remove(episode)
                return
        # The trajectory becomes a row of the batch.
        assert trajectory is not None
        if failure is not None:
            trajectory.fail(failure.text)
        trajectory.failures = episode.failures
        self._ended[episode.row] = trajectory
        self._active.remove(episode)
        self._queue.wake()  # the next batch waits for one conversation fewer

    def _becomes_sample(self, failure: Failure, turns: int) -> bool:
        """Return True if a failed conversation becomes a sample with reward 0, False to repeat it.

        ``turns``: number of the policy's messages. Raises `EnvironmentCallError` if a repetition
        would fail as well, or after more than ``environment.retries`` failures. A failed call of
        the engine counts once, even if several conversations waited for its result.
        """
        earns_zero = self._config.failed == "zero" and turns and failure.reason != "engine_error"
        if failure.kind == "final" or (failure.kind == "fault" and not earns_zero):
            text = f"{failure.text}. The conversation is not repeated, because it would fail again"
            raise EnvironmentCallError(text) from failure.cause
        if earns_zero:
            log.warning("a conversation failed and earns 0 (%s): %s", failure.reason, failure.text)
            return True
        if any(failure is earlier for earlier in self._failures):
            return False
        self._failures.append(failure)
        log.warning(
            "a conversation failed and begins again (%s): %s",
            *(failure.reason, failure.text),
            # Messages of this library's errors are complete without a stack trace.
            exc_info=None if isinstance(failure.cause, AlignerError) else failure.cause,
        )
        if len(self._failures) > self._config.retries:
            raise EnvironmentCallError(
                f"{len(self._failures)} conversations or engine calls failed in a rollout, more "
                f"than environment.retries={self._config.retries}. Correct the cause or raise the "
                f"limit. The last failure: {failure.text}"
            ) from failure.cause
        return False
