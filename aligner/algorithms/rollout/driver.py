"""Driver of the conversations of a rollout: a thread of rank 0 that serves the environments' side.

The main thread samples the rows that wait in a `JobQueue`; this thread begins conversations,
resumes them with what they wait for, and kills what is late. A conversation holds a slot of the
process pool. Random numbers are made of the sample and the attempt, so tokens do not depend on the
order of events, and a batch of the engine waits only a moment for conversations that are slow.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from aligner.config import EnvironmentConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import Answer, Call, EnvironmentPool, Failure
from aligner.environments.trajectory import Trajectory
from aligner.errors import AlignerError, EnvironmentCallError
from aligner.generation.rows import Progress, Row, RowJob
from aligner.http.queue import JobQueue

if TYPE_CHECKING:
    from aligner.serving.sessions import Session

log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two checks of the clocks
_MAX_JOIN_S = 30.0

# A conversation yields a call of its process, or a row that the engine is to continue. It is sent
# the call's return value, or the row's `Progress` with all tokens; a failure is thrown into it.
# At its end it returns its trajectory, None without an answer, and why that is no sample.
Steps = Generator[Call | Row, Any, tuple[Trajectory | None, Failure | None]]


class ConversationFailedError(Exception):
    """A call of a process or of the engine failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass
class Episode:
    """A row of the rollout until its conversation has ended. Times are ``time.monotonic()``.

    ``seed``: of its environment. ``failures``: reasons of the attempts that failed. ``session``: by
    which the process of the call under way may ask the policy. ``silent_s``: seconds since the call
    began or the policy answered. ``used_s``: seconds of all calls, without those in which the
    policy owed an answer. ``reply``: of the engine; None: not yet there.
    """

    row: int
    sample_id: int
    seed: int
    columns: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    slot: int = -1
    steps: Steps = field(init=False)
    call: Call | None = None
    session: "Session | None" = None
    job: RowJob | None = None
    reply: Progress | Exception | None = None
    seen: float = 0.0
    silent_s: float = 0.0
    used_s: float = 0.0
    answers: int = 0  # of the session, when its process was last looked at

    @property
    def attempt(self) -> int:
        """Number of the attempt, of which random numbers are made.

        An attempt that the engine ended is made again with the same ones: what comes of it is what
        would have come without the failure.
        """
        return sum(reason != "engine_error" for reason in self.failures)


class Driver:
    """Rank 0's half of a rollout."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool | None,
        queue: JobQueue[Row],
        conduct: Callable[[Episode], Steps],
    ) -> None:
        """Nothing has begun.

        ``pool``: needed on rank 0 only. ``queue``: of the rows that the engine samples.
        ``conduct``: makes an attempt.
        """
        self._config, self._maybe_pool = config, pool
        self._queue, self._conduct = queue, conduct
        self._waiting: deque[Episode] = deque()
        self._active: list[Episode] = []
        self._free_slots = deque(range(config.concurrency))
        self._ended: dict[int, Trajectory] = {}
        self._failures: list[Failure] = []
        self._stopping, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="conversations", daemon=True)

    @property
    def _pool(self) -> EnvironmentPool:
        assert self._maybe_pool is not None, "rank 0 must hold the environments"
        return self._maybe_pool

    @property
    def is_over(self) -> bool:
        """True once all conversations have ended, or one failed too often."""
        return self._over.is_set()

    def is_complete(self, rows: int) -> bool:
        """Return whether every conversation that can be under way has asked for an answer.

        ``rows``: number of rows that wait for the engine.
        """
        unfinished = len(self._active) + len(self._waiting)
        return rows >= min(self._config.concurrency, unfinished)

    def start(self, data: BatchedDataDict, seed: int, per_prompt: int) -> None:
        """Begin a conversation for every row of ``data``."""
        for row, sample_id in enumerate(data["sample_ids"].tolist()):
            # All samples of a prompt have environments with one seed.
            seeded = random.Random(f"{seed}/{sample_id // per_prompt}").getrandbits(63)
            self._waiting.append(Episode(row, sample_id, seeded, data["columns"][row]))
        self._thread.start()

    def stop(self) -> None:
        """End the conversations that are under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._wake_writer.send_bytes(b"\0")
            self._thread.join(_MAX_JOIN_S)

    def trajectories(self) -> list[Trajectory]:
        """Trajectories in the order of their rows.

        Raises:
            EnvironmentCallError: more conversations failed than may, or none was scored.
        """
        if self._error is not None:
            raise self._error
        trajectories = [self._ended[row] for row in sorted(self._ended)]
        if trajectories and not any(each.is_scored for each in trajectories):
            text = (
                f"environment {self._pool.factory!r} scored none of the {len(trajectories)} "
                "conversations of a rollout: "
            )
            if all(each.end_reason == "done" for each in trajectories):
                raise EnvironmentCallError(
                    f"{text}every reward was None; nothing can be learned of that"
                )
            limits = "limits or failures ended them (environment.max_turns, max_tokens, failed)"
            log.warning("%s%s", text, limits)
        return trajectories

    # In the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
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
            self._over.set()
            self._queue.wake()

    def _fill_slots(self) -> None:
        starting = []
        while self._waiting and self._free_slots:
            episode = self._waiting[0]
            episode.slot, episode.used_s = self._free_slots.popleft(), 0.0
            episode.steps = self._conduct(episode)
            starting.append(episode)
            # In this order, so that `is_complete` in the engine's thread never misses an episode.
            self._active.append(episode)
            self._waiting.popleft()
        self._resume([(episode, None) for episode in starting])

    def _poll(self) -> None:
        """Resume the conversations whose reply has come or whose call has failed."""
        calling = [episode.slot for episode in self._active if episode.call is not None]
        answered = self._pool.answered(calling, _POLL_S, self._wake_reader)
        while self._wake_reader.poll():
            self._wake_reader.recv_bytes()
        now = time.monotonic()
        ready = []
        for episode in self._active:
            reply: Answer | Progress | Failure | None
            if episode.call is not None:
                reply = self._reply_of_process(episode, episode.slot in answered, now)
            else:
                reply = self._reply_of_engine(episode)
            if reply is not None:
                ready.append((episode, reply))
        self._resume(ready)

    def _reply_of_process(
        self, episode: Episode, is_answered: bool, now: float
    ) -> Answer | Failure | None:
        assert episode.call is not None
        spent, episode.seen = now - episode.seen, now
        session = episode.session
        answers = 0 if session is None else len(session.answers)
        if session is not None and (session.is_waiting or answers != episode.answers):
            episode.silent_s, episode.answers = 0.0, answers
        else:
            episode.silent_s += spent
            episode.used_s += spent
        # An agent may hide the engine's failure, so that comes before whatever the agent answered.
        failure = None if session is None else session.engine_failure
        if failure is None and is_answered:
            return self._pool.receive(episode.call, now)
        failure = failure or self._lateness(episode)
        if failure is not None:
            self._pool.kill(episode.slot)
        return failure

    def _reply_of_engine(self, episode: Episode) -> Progress | Failure | None:
        assert episode.job is not None
        if isinstance(episode.reply, Exception):  # without a failure the rollout is over
            return episode.job.failure
        return episode.reply

    def _lateness(self, episode: Episode) -> Failure | None:
        config, name = self._config, self._pool.name
        if episode.silent_s > config.timeout_s:
            lack = "did not answer"
            if episode.session is not None:
                lack = "neither asked the policy nor ended"
            return Failure(
                "env_timeout",
                f"{name} {lack} within environment.timeout_s={config.timeout_s:g} seconds and was "
                "killed; raise it, or make it faster",
            )
        if episode.used_s > config.total_timeout_s:
            return Failure(
                "env_timeout",
                f"{name} took more than environment.total_timeout_s={config.total_timeout_s:g} "
                "seconds, those of the policy not counted, and was killed; raise it, or make it "
                "faster",
            )
        return None

    def _resume(
        self, replies: Sequence[tuple[Episode, Answer | Progress | Failure | None]]
    ) -> None:
        """Resume conversations with their replies, up to what each waits for next."""
        calling: list[tuple[Episode, Call]] = []
        for episode, reply in replies:
            episode.call = episode.job = episode.reply = None
            try:
                if isinstance(reply, Failure):
                    request = episode.steps.throw(ConversationFailedError(reply))
                else:
                    value = reply.value if isinstance(reply, Answer) else reply
                    request = episode.steps.send(value)
            except StopIteration as end:
                self._end(episode, *end.value)
            except ConversationFailedError as error:
                self._end(episode, None, error.failure)
            else:
                if isinstance(request, Call):
                    calling.append((episode, request))
                else:
                    self._ask_engine(episode, request)
        # Processes that are missing start together.
        began = self._pool.begin([call for _, call in calling])
        failed: list[tuple[Episode, Failure]] = []
        for (episode, episode.call), sent in zip(calling, began, strict=True):
            episode.seen, episode.silent_s = time.monotonic(), 0.0
            if isinstance(sent, Failure):
                failed.append((episode, sent))
        if failed:
            self._resume(failed)

    def _ask_engine(self, episode: Episode, row: Row) -> None:
        def report(event: Progress | Exception) -> None:  # in the engine's thread
            episode.reply = event
            self._wake_writer.send_bytes(b"\0")

        episode.job = RowJob([row], report)
        is_queued = self._queue.add(episode.job)
        assert is_queued, "the queue has room for a row of each slot"

    def _end(
        self, episode: Episode, trajectory: Trajectory | None, failure: Failure | None
    ) -> None:
        """Keep the trajectory, or begin the conversation again."""
        self._free_slots.append(episode.slot)
        if failure is not None:
            episode.failures.append(failure.reason)
            turns = 0 if trajectory is None else len(trajectory.turns)
            if not self._becomes_sample(failure, turns):
                self._waiting.append(episode)
                self._active.remove(episode)
                return
            assert trajectory is not None
            trajectory.fail(failure.text)
        assert trajectory is not None
        trajectory.failures = episode.failures
        self._ended[episode.row] = trajectory
        self._active.remove(episode)
        self._queue.wake()  # a batch waits for one conversation less

    def _becomes_sample(self, failure: Failure, turns: int) -> bool:
        """Return whether a conversation of so many turns is a sample of reward 0.

        If not, it begins again. A call of the engine that failed counts once, however many
        conversations waited for it and bring its `Failure`: else it would spend any budget below
        ``environment.concurrency``.

        Raises:
            EnvironmentCallError: that is one failure too many; its cause is what the engine raised,
                if the engine was the last to fail.
        """
        retries = self._config.retries
        if self._config.failed == "zero" and turns and failure.reason != "engine_error":
            log.warning("a conversation failed and earns 0 (%s): %s", failure.reason, failure.text)
            return True
        if any(failure is known for known in self._failures):
            return False
        self._failures.append(failure)
        log.warning(
            "a conversation failed and begins again (%s): %s",
            *(failure.reason, failure.text),
            # The message of an error of this library says what is wrong; a stack adds nothing.
            exc_info=None if isinstance(failure.cause, AlignerError) else failure.cause,
        )
        if len(self._failures) > retries:
            raise EnvironmentCallError(
                f"{len(self._failures)} conversations or calls of the engine failed in a rollout, "
                f"more than environment.retries={retries}; the last: {failure.text}"
            ) from failure.cause
        return False
