"""Sessions: answers to one API key, by token id, as trajectories that can be trained on.

An answer continues the trajectory whose tokens its prompt begins with, to the last one. Where the
prompt begins otherwise (a history that was rewritten, a second answer to the same prompt) a new
trajectory begins; what it has in common with an earlier one is context there, and sampled here
once only (verl, prime-rl and OpenEnv link turns in the same way).
"""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.environments.protocol import Turn, check_turn
from aligner.errors import DataError
from aligner.serving.queue import EndKind

_MOST_TOKENS = 2**21  # of a session
_MOST_SESSIONS = 4096


@dataclass
class Trajectory:
    """Tokens of turns that continue each other; the lists have one value a token.

    ``turn_ids``: number of the turn that sampled a token, from 1; 0: none did, it was read.
    ``logprobs``: of the sampled ones, 0 of the others. ``ends``: why each turn ended.
    ``forked_from``: number of an earlier trajectory of which it has ``shared`` tokens in common,
    sampled ones among them; None: of none.
    """

    ids: list[int]
    logprobs: list[float]
    turn_ids: list[int]
    ends: list[EndKind] = field(default_factory=list)
    forked_from: int | None = None
    shared: int = 0

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
        return dict(vars(self))


class Session:
    """Answers to a key, and their reward. Threads may share it.

    ``seed``: of the random numbers of requests without one of their own. ``reward``: None: none was
    given. ``parts``: further numbers of it.
    """

    def __init__(self, seed: int | None = None) -> None:
        """A session of which nothing was asked yet."""
        self.id, self.key = secrets.token_hex(8), f"session-{secrets.token_urlsafe(24)}"
        self.seed = seed
        self.trajectories: list[Trajectory] = []
        self.reward: float | None = None
        self.parts: dict[str, float] = {}
        self._answers = 0
        self._tokens = 0
        self._lock = threading.Lock()

    def names(self) -> tuple[object, ...] | None:
        """Names of which the random numbers of the next request are made; None: of its own."""
        with self._lock:
            self._answers += 1
            return None if self.seed is None else ("session", self.seed, self._answers)

    def check_room(self, tokens: int) -> None:
        """Refuse a request of so many tokens where the session has too many; `DataError`."""
        if self._tokens + tokens > _MOST_TOKENS:
            raise DataError(
                f"the session has {self._tokens} tokens, and may have {_MOST_TOKENS}; begin "
                "another one"
            )

    def record(
        self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], end: EndKind
    ) -> None:
        """Keep an answer: the tokens ``ids`` with their ``logprobs``, sampled behind ``prompt``."""
        with self._lock:
            longest = max(
                (one for one in self.trajectories if one.follows(prompt)),
                key=lambda one: len(one.ids),
                default=None,
            )
            if longest is None:
                longest = self._begun(prompt)
            longest.read(prompt[len(longest.ids) :])
            longest.sampled(ids, logprobs, end)
            self._tokens = sum(len(one.ids) for one in self.trajectories)

    def set_reward(self, reward: Any) -> None:
        """Take a reward: a number, null (not scored), or a mapping with ``reward``.

        Raises:
            DataError: it is none.
        """
        turn = check_turn(Turn(reward=reward, done=True))
        with self._lock:
            self.reward, self.parts = turn.score, turn.parts

    def as_json(self) -> dict[str, Any]:
        """Everything that was recorded."""
        with self._lock:
            return {
                "id": self.id,
                "reward": self.reward,
                "parts": dict(self.parts),
                "trajectories": [one.as_json() for one in self.trajectories],
            }

    def _begun(self, prompt: Sequence[int]) -> Trajectory:
        made = Trajectory([], [], [])
        for number, one in enumerate(self.trajectories):
            shared = one.common(prompt)
            if shared > made.shared and any(one.turn_ids[:shared]):
                made.forked_from, made.shared = number, shared
        self.trajectories.append(made)
        return made


class Sessions:
    """The sessions of a server."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, seed: int | None = None) -> Session | None:
        """A new session; None: there are too many."""
        with self._lock:
            if len(self._by_key) >= _MOST_SESSIONS:
                return None
            session = Session(seed)
            self._by_key[session.key] = session
            return session

    def of_key(self, key: str) -> Session | None:
        """The session of an API key."""
        return self._by_key.get(key)

    def of_id(self, name: str) -> Session | None:
        """The session of this id."""
        with self._lock:
            return next((one for one in self._by_key.values() if one.id == name), None)

    def end(self, session: Session) -> None:
        """Forget a session; its key is refused from now on."""
        with self._lock:
            self._by_key.pop(session.key, None)
