"""Sessions: answers to one API key, by token id, as sequences that can be trained on.

An answer continues the sequence whose tokens its prompt begins with, to the last one. A prompt
whose text continues one keeps its tokens, also where the text would be encoded otherwise. Where the
prompt begins otherwise (a history that was rewritten, a second answer to the same prompt) a new
sequence begins; what it has in common with an earlier one is context there, and sampled here
once only (verl, prime-rl and OpenEnv link turns in the same way).
"""

import math
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from aligner.environments.pool import Failure
from aligner.environments.protocol import Turn, check_turn
from aligner.errors import DataError
from aligner.generation.rows import EndKind, RowJob, sample_id

_MOST_TOKENS = 2**21  # of a session
_MOST_SESSIONS = 4096


@dataclass
class RecordedSequence:
    """Tokens of turns that continue each other, recorded by a session.

    The lists have one value a token.

    ``turn_ids``: number of the turn that sampled a token, from 1; 0: none did, it was read.
    ``logprobs``: of the sampled ones, 0 of the others. ``ends``: why each turn ended.
    ``forked_from``: number of an earlier sequence of which it has ``shared`` tokens in common,
    sampled ones among them; None: of none. ``text``: of all its tokens; None: not known.
    """

    ids: list[int]
    logprobs: list[float]
    turn_ids: list[int]
    ends: list[EndKind] = field(default_factory=list)
    forked_from: int | None = None
    shared: int = 0
    text: str | None = None

    def follows(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt begins with all of these tokens."""
        return list(prompt[: len(self.ids)]) == self.ids

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.turn_ids += [0] * len(ids)

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], end: EndKind) -> None:
        """Append a turn."""
        self.ends.append(end)
        self.ids += ids
        self.logprobs += logprobs
        self.turn_ids += [len(self.ends)] * len(ids)

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens with which a prompt and these begin in common."""
        pairs = zip(self.ids, prompt, strict=False)
        return next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(prompt))
        )

    def as_json(self) -> dict[str, Any]:
        """The same for an answer over HTTP."""
        return {name: value for name, value in vars(self).items() if name != "text"}


Limit = Literal["max_turns", "max_tokens"]


class Limits(NamedTuple):
    """Limits of a session, behind which it is over.

    ``answers``: that it may ask for. ``tokens``: of all its sequences.
    """

    answers: int
    tokens: int


class Session:
    """Answers to a key, and their reward. Threads may share it.

    ``seed``: of the random numbers of requests without one of their own. ``sequences``: what was
    recorded; ``order``: of each answer, as they came, the number of its sequence and of its turn
    there; ``requests``: of each answer, its number among those that were asked for. ``rewards``: by
    the number of answers that were recorded when they were given.
    ``exceeded``: the limit that a request ran into; None: none did.
    """

    def __init__(self, seed: int | None = None, limits: Limits | None = None) -> None:
        """A session of which nothing was asked yet; ``limits``: None: the server's own."""
        self.id, self.key = secrets.token_hex(8), f"session-{secrets.token_urlsafe(24)}"
        self.seed = seed
        self.sequences: list[RecordedSequence] = []
        self.order: list[tuple[int, int]] = []
        self.requests: list[int] = []
        self.rewards: dict[int, Turn] = {}
        self.exceeded: Limit | None = None
        self._jobs: list[RowJob] = []
        self._limits = limits
        self._last: Turn | None = None  # the reward that was given last
        self._asked: Counter[int] = Counter()
        self._expected: dict[int, tuple[int, ...]] = {}  # prompts, by numbers of their answers
        self._admitted = 0  # answers
        self._tokens = self._bound = 0
        self._texts: dict[tuple[int, ...], str] = {}  # of prompts that wait for answers
        self.used = time.monotonic()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def reward(self) -> float | None:
        """The reward that was given last; None: none was, or it said that nothing is scored."""
        return None if self._last is None else self._last.score

    @property
    def parts(self) -> dict[str, float]:
        """Further numbers of it."""
        return {} if self._last is None else self._last.parts

    @property
    def is_waiting(self) -> bool:
        """True as long as the engine owes it an answer."""
        with self._lock:
            self._jobs = [job for job in self._jobs if job.is_open or job.failure]
            return any(job.is_open for job in self._jobs)

    @property
    def engine_failure(self) -> Failure | None:
        """First failure of the engine in place of an answer; None: it has answered."""
        with self._lock:
            return next((job.failure for job in self._jobs if job.failure), None)

    def follow(self, job: RowJob) -> None:
        """Take note of a request that the engine is given."""
        with self._lock:
            self._jobs.append(job)

    def names(self, prompts: Sequence[Sequence[int]] = ()) -> tuple[object, ...] | None:
        """Names of which the random numbers of a request are made; None: of its own.

        They differ where the same is asked again. Which other requests came before does not matter.
        """
        if self.seed is None:
            return None
        asked = sample_id(*chain.from_iterable(prompts))
        with self._lock:
            self._asked[asked] += 1
            return ("session", self.seed, asked, self._asked[asked])

    def encoded(
        self, text: str, begin: Callable[[str], list[int]], go_on: Callable[[str], list[int]]
    ) -> list[int]:
        """Tokens of a prompt; where it continues a sequence these come first as they are.

        Args:
            text: of the prompt.
            begin: encodes a whole one.
            go_on: encodes what is added to one.
        """
        with self._lock:
            known = [one for one in self.sequences if one.text and text.startswith(one.text)]
            longest = max(known, key=lambda one: len(one.text or ""), default=None)
            begun = [] if longest is None else longest.ids[:]
            rest = text if longest is None else text[len(longest.text or "") :]
        ids = begin(text)
        if ids[: len(begun)] != begun:  # what was sampled would be encoded otherwise
            ids = [*begun, *go_on(rest)]
        with self._lock:
            self._texts[tuple(ids)] = text
        return ids

    def admit(self, prompts: Sequence[Sequence[int]], longest: int, answers: int) -> range:
        """Numbers of a request's answers in the session, those to a prompt adjacent.

        `record` or `withdraw` must follow for each. A request is refused that may take the session
        beyond its limits.

        Args:
            prompts: their tokens.
            longest: most tokens of an answer.
            answers: so many are asked for behind each prompt.

        Raises:
            DataError: it may; where limits were given the session is over then.
        """
        most = self._limits or Limits(sys.maxsize, _MOST_TOKENS)
        with self._lock:
            bound, known = self._bound, 0
            if not self._expected:
                followed = (len(one.ids) for one in self.sequences if one.follows(prompts[0]))
                bound, known = self._tokens, max(followed, default=0)
            bound += answers * sum(len(prompt) + longest for prompt in prompts) - known
            first, self._admitted = self._admitted, self._admitted + answers * len(prompts)
            limit = self.exceeded
            if limit is None and self._admitted > most.answers:
                limit = "max_turns"
            elif limit is None and bound > most.tokens:
                limit = "max_tokens"
            if limit is None:
                self._bound = bound
                keys = [key for key in map(tuple, prompts) for _ in range(answers)]
                self._expected |= dict(enumerate(keys, start=first))
                return range(first, self._admitted)
            self._drop_texts(prompts)
            if self._limits is not None:
                self.exceeded = limit
        if limit == "max_turns":
            raise DataError(f"the session is over: it may have {most.answers} answers")
        if self._limits is not None:
            raise DataError(
                f"the session is over: it may have {most.tokens} tokens, and could have {bound} "
                "after this"
            )
        raise DataError(
            f"the session has {self._tokens} tokens, may have {most.tokens}, and could have "
            f"{bound} after this; begin another one"
        )

    def withdraw(self, prompts: Sequence[Sequence[int]], requests: Sequence[int | None]) -> None:
        """Expect no more answers to these, one each: they failed, or their client left.

        They have taken no tokens; among the answers that the session may ask for they count.
        ``requests``: the numbers of the answers, from `admit`.
        """
        with self._lock:
            self._expected = {n: key for n, key in self._expected.items() if n not in requests}
            self._drop_texts(prompts)

    def record(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        end: EndKind,
        text: str,
        request: int | None = None,
    ) -> None:
        """Keep an answer: the tokens ``ids`` with their ``logprobs``, sampled behind ``prompt``.

        ``text``: of all of them, that of a token that ended it included. ``request``: its number,
        of `admit`; None: the first that is expected behind this prompt.
        """
        with self._lock:
            key = tuple(prompt)
            if request is None:
                expected = (n for n, each in self._expected.items() if each == key)
                request = next(expected, self._admitted)
            self._expected.pop(request, None)
            if self._is_closed:
                return
            followed = [n for n, one in enumerate(self.sequences) if one.follows(prompt)]
            number = max(followed, key=lambda n: len(self.sequences[n].ids), default=None)
            if number is None:
                number = self._begin(prompt)
            longest = self.sequences[number]
            longest.read(prompt[len(longest.ids) :])
            longest.sampled(ids, logprobs, end)
            before = self._texts.get(key)
            longest.text = None if before is None else before + text
            self._drop_texts([prompt])
            self.order.append((number, len(longest.ends)))
            self.requests.append(request)
            self._tokens = sum(len(one.ids) for one in self.sequences)

    def set_reward(self, reward: Any) -> None:
        """Take a reward: a number, null (not scored), or a mapping with ``reward``.

        It is of the answer that was recorded last, in place of one that it had.

        Raises:
            DataError: it is none.
        """
        turn = check_turn(Turn(reward=reward, done=True))
        with self._lock:
            self._last = self.rewards[len(self.order)] = turn

    def close(self) -> None:
        """Record nothing more."""
        with self._lock:
            self._is_closed = True

    def as_json(self) -> dict[str, Any]:
        """Everything that was recorded."""
        with self._lock:
            return {
                "id": self.id,
                "reward": self.reward,
                "parts": self.parts,
                # Clients know them by this name.
                "trajectories": [one.as_json() for one in self.sequences],
            }

    def _drop_texts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget the texts of prompts that wait for no answer."""
        waiting = set(self._expected.values())
        for key in map(tuple, prompts):
            if key not in waiting:
                self._texts.pop(key, None)

    def _begin(self, prompt: Sequence[int]) -> int:
        """Number of a new sequence."""
        made = RecordedSequence([], [], [])
        for number, one in enumerate(self.sequences):
            shared = one.common(prompt)
            if shared > made.shared and any(one.turn_ids[:shared]):
                made.forked_from, made.shared = number, shared
        self.sequences.append(made)
        return len(self.sequences) - 1


class Sessions:
    """The sessions of a server.

    One that nobody used for ``idle_s`` seconds, and that waits for no answer, is forgotten.
    """

    def __init__(self, idle_s: float = math.inf) -> None:
        self._idle_s = idle_s
        self._by_key: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, seed: int | None = None, limits: Limits | None = None) -> Session | None:
        """A new session; None: there are too many."""
        self._forget_idle()
        with self._lock:
            if len(self._by_key) >= _MOST_SESSIONS:
                return None
            session = Session(seed, limits)
            self._by_key[session.key] = session
            return session

    def of_key(self, key: str) -> Session | None:
        """The session of an API key."""
        session = self._by_key.get(key)
        if session is not None:
            session.used = time.monotonic()
        return session

    def _forget_idle(self) -> None:
        latest = time.monotonic() - self._idle_s
        with self._lock:
            idle = [one for one in self._by_key.values() if one.used < latest]
        for session in idle:
            if not session.is_waiting:
                self.end(session)

    def of_id(self, name: str) -> Session | None:
        """The session of this id."""
        with self._lock:
            return next((one for one in self._by_key.values() if one.id == name), None)

    def end(self, session: Session) -> None:
        """Forget a session; its key is refused from now on."""
        with self._lock:
            self._by_key.pop(session.key, None)
        session.close()
