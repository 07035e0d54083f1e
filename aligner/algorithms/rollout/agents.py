"""Agents of a rollout: who is under way, what each asked the policy for, and how long it took.

A thread of rank 0 begins agents, and ends those that are late, while the engine answers. An agent's
clock stands still as long as the engine owes it an answer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.algorithms.rollout.trajectories import (
    EndReason,
    Failures,
    Trajectory,
    attempt,
    check_scored,
    environment_seed,
    total_parts,
    transcript,
)
from aligner.config import EnvironmentConfig
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.conversation import TurnRecord
from aligner.environments.pool import Answer, Call, EnvironmentPool, Failure
from aligner.environments.protocol import Turn, check_total
from aligner.errors import DataError
from aligner.serving.queue import sample_id
from aligner.serving.sessions import Limits, Session, Sessions

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks at the clocks
_MOST_JOIN_S = 30.0


@dataclass
class _Agent:
    """A row of the rollout, until its agent has ended. Times are ``time.monotonic()``."""

    row: int
    sample_id: int
    seed: int
    columns: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    slot: int = -1
    call: Call | None = None
    under_way: Session | None = None
    seen: float = 0.0
    silent_s: float = 0.0  # since the policy's last answer
    used_s: float = 0.0  # since it began, without the policy's answers

    @property
    def session(self) -> Session:
        """Session of an agent that is under way."""
        assert self.under_way is not None
        return self.under_way


class Agents:
    """Rank 0's half of a rollout."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        sessions: Sessions,
        base_url: str,
        tokenizer: Tokenizer,
        woken: Callable[[], None],
    ) -> None:
        """``sessions``: of the server at ``base_url``. ``woken``: called when all are over."""
        self._woken = woken
        self._config, self._pool, self._sessions = config, pool, sessions
        self._base_url, self._tokenizer = base_url, tokenizer
        self._waiting: deque[_Agent] = deque()
        self._active: list[_Agent] = []
        self._free = list(range(config.concurrency))
        self._ended: dict[int, Trajectory] = {}
        self._failures = Failures(config)
        self._limits = Limits(config.max_turns, config.max_tokens)
        self._stopping, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._seed = 0
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    @property
    def are_over(self) -> bool:
        """True once all have ended, or one failed too often."""
        return self._over.is_set()

    def start(self, data: BatchedDataDict, seed: int, per_prompt: int) -> None:
        """Begin an agent for every row of ``data``."""
        self._seed = seed
        for row, sample in enumerate(data["sample_ids"].tolist()):
            seeded = environment_seed(seed, sample, per_prompt)
            self._waiting.append(_Agent(row, sample, seeded, data["columns"][row]))
        self._thread.start()

    def stop(self) -> None:
        """End those that are under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_MOST_JOIN_S)

    def rows(self) -> list[Trajectory]:
        """Trajectories in the order of their rows.

        Raises:
            EnvironmentCallError: more failed than may, or none was scored.
        """
        if self._error is not None:
            raise self._error
        found = [self._ended[row] for row in sorted(self._ended)]
        check_scored(found, self._pool.factory)
        return found

    # In the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (self._waiting or self._active) and not self._stopping.is_set():
                self._begin()
                self._look()
        except Exception as error:
            self._error = error
        finally:
            for one in self._active:
                self._sessions.end(one.session)
                self._pool.kill(one.slot)
            self._over.set()
            self._woken()

    def _begin(self) -> None:
        """Begin as many as there are free slots."""
        starting = []
        while self._waiting and self._free:
            one = self._waiting.popleft()
            one.slot = self._free.pop(0)
            names = ("rollout", self._seed, one.sample_id, attempt(one.failures))
            one.under_way = self._sessions.begin(sample_id(*names), self._limits)
            argument = (self._base_url, one.session.key, one.seed, one.columns)
            one.call = Call(one.slot, "run", argument, self._config.timeout_s)
            starting.append(one)
        began = self._pool.begin([one.call for one in starting if one.call is not None])
        self._active += starting
        for one, found in zip(starting, began, strict=True):
            one.seen, one.silent_s, one.used_s = time.monotonic(), 0.0, 0.0
            if isinstance(found, Failure):
                self._end(one, found)

    def _look(self) -> None:
        """Take what has ended, and kill what is late."""
        answered = self._pool.answered([one.slot for one in self._active], _LOOK_S)
        for one in list(self._active):
            now = time.monotonic()
            spent, one.seen = now - one.seen, now
            if one.session.is_waiting:
                one.silent_s = 0.0
            else:
                one.silent_s += spent
                one.used_s += spent
            failure = one.session.engine_failure
            if failure is not None:  # whatever the agent makes of the status that it was given
                self._pool.kill(one.slot)
                self._end(one, failure)
            elif one.slot in answered:
                assert one.call is not None
                self._end(one, self._pool.receive(one.call, now))
            elif (late := self._lateness(one)) is not None:
                self._pool.kill(one.slot)
                self._end(one, Failure("env_timeout", late))

    def _lateness(self, one: _Agent) -> str | None:
        config, name = self._config, f"agent {self._pool.factory!r}"
        if one.silent_s > config.timeout_s:
            return (
                f"{name} neither asked the policy nor ended within environment.timeout_s="
                f"{config.timeout_s:g} seconds and was killed; raise it, or make the agent faster"
            )
        if one.used_s > config.total_timeout_s:
            return (
                f"{name} took more than environment.total_timeout_s={config.total_timeout_s:g} "
                "seconds, those of the policy not counted, and was killed; raise it, or make the "
                "agent faster"
            )
        return None

    def _end(self, one: _Agent, found: Answer | Failure) -> None:
        """Take what an agent left: a trajectory, or a failure (`Failures`).

        Behind a limit it does not matter how it ended, unless the engine failed.
        """
        session = one.session
        self._sessions.end(session)
        self._active.remove(one)
        self._free.append(one.slot)
        by_engine = isinstance(found, Failure) and found.reason == "engine_error"
        is_cut = session.exceeded is not None and not by_engine
        if not session.order and (isinstance(found, Answer) or is_cut):
            turn = found.value if isinstance(found, Answer) else Turn()
            found = Failure("env_error", self._without_answer(session, turn))
        info: dict[str, Any] = {}
        if isinstance(found, Answer):
            info = dict(found.value.info)
            if found.value.reward is not None:
                session.set_reward(found.value.reward)
        try:
            check_total(turn.score for turn in session.rewards.values())
        except DataError as error:
            if not by_engine:
                found = Failure("env_error", f"agent {self._pool.factory!r}: {error}")
                is_cut = False
        reason: EndReason = session.exceeded or "done"
        if isinstance(found, Failure) and not (is_cut and session.order):
            one.failures.append(found.reason)
            if not self._failures.add(found, len(session.order)):
                self._waiting.append(one)
                return
            session.rewards.clear()
            reason, info = "failed", {"failure": found.text}
        self._ended[one.row] = trajectory_of(session, self._tokenizer, reason, one.failures, info)

    def _without_answer(self, session: Session, turn: Turn) -> str:
        text = f"agent {self._pool.factory!r} ended without an answer of the policy"
        if session.exceeded is not None:
            text += (
                f": what it asked first does not fit environment.{session.exceeded}="
                f"{getattr(self._config, session.exceeded)}"
            )
        output = turn.info.get("output")
        return text if output is None else f"{text}; what it wrote ends: {output}"


def trajectory_of(
    session: Session,
    tokenizer: Tokenizer,
    reason: EndReason,
    failures: list[str],
    info: dict[str, Any],
) -> Trajectory:
    """Record of a session as a row: its sequences one behind the other, as they were asked for.

    Turns are numbered in the order of their requests, not of answers or of places in the row. A
    reward is of the last requested answer that came since the reward before it, or else of the same
    as that; ``info`` goes with the last.
    """
    ids, turn_ids, positions, logprobs = list[int](), list[int](), list[int](), list[float]()
    in_time = sorted(zip(session.requests, session.order, strict=True))
    place = {answer: turn for turn, (_, answer) in enumerate(in_time, start=1)}
    heard, records = dict[int, str](), dict[int, TurnRecord]()
    for number, one in sorted(enumerate(session.sequences), key=lambda each: place[each[0], 1]):
        numbers = [0, *(place[number, turn] for turn in range(1, len(one.ends) + 1))]
        for turn, (read, sampled) in enumerate(_spans(one.turn_ids, len(one.ends)), start=1):
            heard[numbers[turn]] = tokenizer.decode(one.ids[slice(*read)])
            tokens = one.ids[slice(*sampled)]
            content = decode_response(tokenizer, one.ids[: sampled[0]], tokens)
            is_end = one.ends[turn - 1] == "stop"
            records[numbers[turn]] = TurnRecord(content, len(tokens), is_end)
        ids += one.ids
        logprobs += one.logprobs
        positions += range(len(one.ids))
        turn_ids += [numbers[turn] for turn in one.turn_ids]
    turns = [records[turn] for turn in sorted(records)]
    for turn, record in enumerate(turns[:-1], start=1):
        record.answer = [{"role": "agent", "content": heard[turn + 1]}]
    rewards = [0.0] * len(ids)
    last_of = {turn: at for at, turn in enumerate(turn_ids)}
    begin = 0
    for answers, given in session.rewards.items():
        turn = max((place[answer] for answer in session.order[begin:answers]), default=1)
        begin = answers
        turns[turn - 1].reward, turns[turn - 1].parts = given.score, given.parts
        rewards[last_of[turn]] = given.score or 0.0
    turns[-1].info = info
    return Trajectory(
        prompt=heard[1],
        prompt_length=next(at for at, turn in enumerate(turn_ids) if turn),
        ids=ids,
        turn_ids=turn_ids,
        positions=positions,
        logprobs=logprobs,
        rewards=rewards,
        is_scored=any(turn.reward is not None for turn in turns),
        parts=total_parts(turns),
        end_reason=reason,
        forks=len(session.sequences) - 1,
        text=transcript(turns),
        turns=[vars(turn).copy() for turn in turns],
        failures=failures,
    )


def _spans(turn_ids: Sequence[int], turns: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Begin and end of what was read before each turn, and of what was sampled in it."""
    ends = [0, *(len(turn_ids) - turn_ids[::-1].index(turn) for turn in range(1, turns + 1))]
    begins = [turn_ids.index(turn) for turn in range(1, turns + 1)]
    return [
        ((before, begin), (begin, end))
        for before, begin, end in zip(ends[:-1], begins, ends[1:], strict=True)
    ]
