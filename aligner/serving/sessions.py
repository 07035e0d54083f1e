"""Sessions: all answers sampled for one API key, recorded as token sequences for training.

    admit (reserve answers) ─► engine ─► record (append an answer)
                                  └────► withdraw (the request failed, or its client disconnected)

If a prompt starts with all tokens of a recorded sequence, its answer is appended to that sequence.
A prompt whose text starts with the text of a sequence reuses the token ids of the sequence. Any
other prompt (a rewritten history, a second answer to the same prompt) starts a new sequence. Tokens
that a new sequence shares with an earlier sequence are marked as sampled in the earlier one only.
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
from typing import Any, NamedTuple

from aligner.data.tokenizers.decoding import common_prefix
from aligner.device.counter_hash import text_hash
from aligner.environments.pool import Failure
from aligner.environments.protocol import Turn, check_turn
from aligner.environments.trajectory import Limit, Limits
from aligner.errors import DataError
from aligner.generation.rows import EndKind, RowJob

_MAX_TOKENS = 2**21  # limit of a session for which none was set
_MAX_SESSIONS = 4096


@dataclass
class RecordedSequence:
    """Tokens of consecutive turns. ``ids``, ``logprobs`` and ``turn_ids`` have a value per token.

    If the first ``shared`` tokens equal those of an earlier sequence, and the model sampled at
    least one of them, ``forked_from`` is the index of the earlier sequence.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 for tokens of prompts
    turn_ids: list[int] = field(default_factory=list)  # turn of a sampled token, from 1. 0: prompt
    ends: list[EndKind] = field(default_factory=list)  # reason why each turn ended
    forked_from: int | None = None
    shared: int = 0
    text: str | None = None  # text of all tokens, None if it is not known

    def is_prefix_of(self, prompt: Sequence[int]) -> bool:
        """Return whether ``prompt`` begins with all tokens of the sequence."""
        return list(prompt[: len(self.ids)]) == self.ids

    def append(self, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        """Append tokens sampled in turn ``turn`` (from 1). Turn 0: tokens of a prompt."""
        self.ids += ids
        self.logprobs += logprobs
        self.turn_ids += [turn] * len(ids)

    def as_json(self) -> dict[str, Any]:
        """Return the fields except ``text``, for an HTTP response."""
        return {name: value for name, value in vars(self).items() if name != "text"}


class RecordedAnswer(NamedTuple):
    """Where a recorded answer is: the index of its sequence, and token indices there."""

    request: int  # index of the answer among all requested answers, from `Session.admit`
    sequence: int
    start: int  # index of the first new prompt token
    begin: int  # index of the answer's first token
    end: int  # index after the answer's last token


class Session:
    """Answers and rewards of one API key. Thread-safe. Exceeding ``limits`` ends the session."""

    def __init__(self, seed: int | None = None, limits: Limits | None = None) -> None:
        # The id is public. Only the key authorises requests.
        self.id, self.key = secrets.token_hex(8), f"session-{secrets.token_urlsafe(24)}"
        self.seed = seed  # for requests without a seed
        self.sequences: list[RecordedSequence] = []
        self.answers: list[RecordedAnswer] = []  # in order of arrival
        self.rewards: dict[int, Turn] = {}  # number of answers so far → the last reward set then
        self.exceeded: Limit | None = None  # the limit that a request exceeded
        # Requests of the session, reserved answers, and prompts as text.
        self._jobs: list[RowJob] = []
        self._limits = limits
        self._last_reward: Turn | None = None
        self._repeats: Counter[int] = Counter()  # hash of prompts → number of requests with them
        self._expected: dict[int, tuple[int, ...]] = {}  # index of an answer → its prompt
        self._admitted = 0  # number of reserved answers so far
        self._bound = 0  # maximum number of tokens after all expected answers
        self._texts: dict[tuple[int, ...], str] = {}  # prompt → its text, until it is answered
        self.used = time.monotonic()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def reward(self) -> float | None:
        """The last reward. None if there is none, or the reward is null."""
        return None if self._last_reward is None else self._last_reward.score

    @property
    def is_waiting(self) -> bool:
        """True while requests of the session are in progress."""
        with self._lock:
            self._jobs = [job for job in self._jobs if job.is_open or job.failure]
            return any(job.is_open for job in self._jobs)

    @property
    def engine_failure(self) -> Failure | None:
        """The first failure of the engine in a request of the session, or None."""
        with self._lock:
            return next((job.failure for job in self._jobs if job.failure), None)

    def track(self, job: RowJob) -> None:
        """Include a request in `is_waiting` and `engine_failure`."""
        with self._lock:
            self._jobs.append(job)

    def seed_parts(self, prompts: Sequence[Sequence[int]] = ()) -> tuple[object, ...] | None:
        """Return values that determine a request's seed, or None if the session has no seed."""
        if self.seed is None:
            return None
        prompts_id = text_hash(*chain.from_iterable(prompts))
        # The count makes the sampling of repeated requests independent.
        with self._lock:
            self._repeats[prompts_id] += 1
            return ("session", self.seed, prompts_id, self._repeats[prompts_id])

    def encode(
        self,
        text: str,
        encode_text: Callable[[str], list[int]],
        encode_continuation: Callable[[str], list[int]],
    ) -> list[int]:
        """Return the token ids of a prompt. Keep the ids of a recorded sequence that it extends.

        ``encode_text`` encodes a text from its beginning, ``encode_continuation`` a text that
        follows another text.
        """
        # The longest sequence whose text the prompt starts with.
        with self._lock:
            known = [(s.text, s.ids[:]) for s in self.sequences if s.text]
            extended = [pair for pair in known if text.startswith(pair[0])]
            prefix, prefix_ids = max(extended, key=lambda pair: len(pair[0]), default=("", []))
        ids = encode_text(text)
        if ids[: len(prefix_ids)] != prefix_ids:  # the tokenizer would encode the answer otherwise
            ids = [*prefix_ids, *encode_continuation(text[len(prefix) :])]
        with self._lock:
            self._texts[tuple(ids)] = text
        return ids

    def admit(self, prompts: Sequence[Sequence[int]], longest: int, answers: int) -> range:
        """Reserve ``answers`` answers to each prompt. Return their indices, grouped by prompt.

        Call `record` or `withdraw` for each answer afterwards. ``longest``: maximum number of
        tokens of an answer. Raises `DataError` if the request could exceed a limit. If the session
        has limits, this also ends the session.
        """
        limits = self._limits or Limits(sys.maxsize, _MAX_TOKENS)
        with self._lock:
            # Bound the number of tokens after this request. If no other answer is expected, the
            # recorded tokens are known, and tokens that the first prompt repeats count once.
            recorded = sum(len(sequence.ids) for sequence in self.sequences)
            bound = self._bound
            if not self._expected:
                lengths = (len(s.ids) for s in self.sequences if s.is_prefix_of(prompts[0]))
                bound = recorded - max(lengths, default=0)
            bound += answers * sum(len(prompt) + longest for prompt in prompts)
            # Reserve the answers, unless a limit is exceeded. Refused answers count as well.
            first = self._admitted
            self._admitted += answers * len(prompts)
            limit = self.exceeded or limits.exceeded(self._admitted, bound)
            if limit is None:
                self._bound = bound
                keys = [key for key in map(tuple, prompts) for _ in range(answers)]
                self._expected |= dict(enumerate(keys, start=first))
                return range(first, self._admitted)
            self._drop_texts(prompts)
            if self._limits is not None:
                self.exceeded = limit
        # A session with limits has ended. Without, only this request is refused.
        reason = f"limited to {limits.max_turns} answers"
        if limit == "max_tokens":
            reason = f"limited to {limits.max_tokens} tokens, has {recorded}, and could get {bound}"
        text = f"the session has ended, because it is {reason}"
        if self._limits is None:
            text = f"the session is {reason}. Begin another session"
        raise DataError(text)

    def withdraw(self, prompts: Sequence[Sequence[int]], requests: Sequence[int | None]) -> None:
        """Cancel reserved answers, given by indices from `admit`. They still count as answers."""
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
        request: int,
    ) -> None:
        """Record an answer to ``prompt``: the sampled tokens ``ids`` and their ``logprobs``.

        ``end``: why the answer ended. ``text``: text of ``ids``, with the end token. ``request``:
        index of the answer, from `admit`.
        """
        with self._lock:
            key = tuple(prompt)
            self._expected.pop(request, None)
            if self._is_closed:
                return
            # Find the longest sequence that the prompt extends, or add a sequence.
            candidates = [n for n, s in enumerate(self.sequences) if s.is_prefix_of(prompt)]
            if not candidates:
                candidates = [len(self.sequences)]
                self._start_sequence(prompt)
            index = max(candidates, key=lambda n: len(self.sequences[n].ids))
            # Append the new tokens of the prompt, and the answer as a turn.
            sequence = self.sequences[index]
            start = len(sequence.ids)
            sequence.append(prompt[start:], [0.0] * (len(prompt) - start), turn=0)
            sequence.ends.append(end)
            sequence.append(ids, logprobs, turn=len(sequence.ends))
            # The text is unknown if the client sent the prompt as token ids.
            prompt_text = self._texts.get(key)
            sequence.text = None if prompt_text is None else prompt_text + text
            self._drop_texts([prompt])
            end_index = len(sequence.ids)
            self.answers.append(RecordedAnswer(request, index, start, len(prompt), end_index))

    def set_reward(self, reward: Any) -> None:
        """Set the reward of the last answer: a number, None, or a dict with the key ``reward``."""
        turn = check_turn(Turn(reward=reward, done=True))
        with self._lock:
            self._last_reward = self.rewards[len(self.answers)] = turn

    def close(self) -> None:
        """Stop recording answers."""
        with self._lock:
            self._is_closed = True

    def as_json(self) -> dict[str, Any]:
        """Return the session's record, for an HTTP response."""
        with self._lock:
            return {
                "id": self.id,
                "reward": self.reward,
                "parts": {} if self._last_reward is None else self._last_reward.parts,
                # The published name of the sequences.
                "trajectories": [sequence.as_json() for sequence in self.sequences],
            }

    def _drop_texts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Delete the texts of prompts to which no answer is expected."""
        waiting = set(self._expected.values())
        for key in map(tuple, prompts):
            if key not in waiting:
                self._texts.pop(key, None)

    def _start_sequence(self, prompt: Sequence[int]) -> None:
        """Add an empty sequence. Record the earlier sequence with the longest common prefix."""
        new = RecordedSequence()
        for index, sequence in enumerate(self.sequences):
            shared = common_prefix(sequence.ids, prompt)
            if shared > new.shared and any(sequence.turn_ids[:shared]):
                new.forked_from, new.shared = index, shared
        self.sequences.append(new)


class Sessions:
    """The sessions of a server. A session unused for ``idle_s`` seconds is removed."""

    def __init__(self, idle_s: float = math.inf) -> None:
        self._idle_s = idle_s
        self._by_key: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, seed: int | None = None, limits: Limits | None = None) -> Session | None:
        """Create and return a session, or None if the server has too many sessions."""
        oldest_use = time.monotonic() - self._idle_s
        with self._lock:
            for session in list(self._by_key.values()):
                if session.used < oldest_use and not session.is_waiting:
                    del self._by_key[session.key]
                    session.close()
            if len(self._by_key) >= _MAX_SESSIONS:
                return None
            session = Session(seed, limits)
            self._by_key[session.key] = session
            return session

    def with_key(self, key: str) -> Session | None:
        """Return the session of an API key and mark it as used, or return None."""
        session = self._by_key.get(key)
        if session is not None:
            session.used = time.monotonic()
        return session

    def with_id(self, session_id: str) -> Session | None:
        """Return the session with this id, or None."""
        with self._lock:
            return next((s for s in self._by_key.values() if s.id == session_id), None)

    def end(self, session: Session) -> None:
        """Remove a session. Later requests with its key are refused."""
        with self._lock:
            self._by_key.pop(session.key, None)
        session.close()
