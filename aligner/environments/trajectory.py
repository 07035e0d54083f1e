"""Trajectory of a conversation: its tokens, which of them were sampled, and its turns."""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from torch import Tensor

from aligner.data.chat import Message
from aligner.data.tokenizers.decoding import IncrementalDecoder
from aligner.data.tokenizers.tokenizer import Tokenizer

Limit = Literal["max_turns", "max_tokens"]
EndReason = Literal["done", "max_turns", "max_tokens", "failed"]


class Limits(NamedTuple):
    """Maximum numbers of turns and tokens of a conversation or a session."""

    max_turns: int = sys.maxsize
    max_tokens: int = sys.maxsize

    def exceeded(self, turns: int, tokens: int) -> Limit | None:
        """Return the name of the first limit that is exceeded, None if neither is."""
        if turns > self.max_turns:
            return "max_turns"
        return "max_tokens" if tokens > self.max_tokens else None


@dataclass
class TurnRecord:
    """A turn: the policy's message, its reward, and the messages that answer it."""

    content: str
    tokens: int  # number of sampled tokens
    ended: bool  # the last sampled token is an end token
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    answer: list[Message] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # end in characters, reward


class KeptTokens(NamedTuple):
    """Token ids that top-k and top-p kept at each sampled token of a turn."""

    start: int  # index of the first sampled token in the row
    ids: Tensor  # int32 [n, K] for n sampled tokens, padded with -1


@dataclass
class Trajectory:
    """Record of a conversation. ``ids``, ``logprobs`` and ``turn_ids`` have a value per token.

    ``prompt``: text before the first turn. ``ids``: tokens of all sequences, one after the other.
    A forked conversation has several sequences. ``starts``: index at which each sequence begins.
    ``logprobs``: log-probs of sampled tokens, 0 for other tokens. ``turn_ids``: number of the turn
    in which the token was sampled, counted from 1, and 0 for other tokens. ``failures``: error
    messages of earlier attempts at this conversation.
    """

    tokenizer: Tokenizer
    prompt: str = ""
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    kept_tokens: list[KeptTokens] = field(default_factory=list)
    end_reason: EndReason = "done"
    failures: list[str] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled token."""
        return self.turn_ids.index(1) if self.turns else len(self.ids)

    @property
    def length(self) -> int:
        """Number of tokens up to the last sampled token. Later tokens are not trained on."""
        return 1 + max((index for index, turn in enumerate(self.turn_ids) if turn), default=-1)

    @property
    def positions(self) -> list[int]:
        """Position of each of the first `length` tokens in its sequence, counted from 0."""
        bounds = zip(self.starts, [*self.starts[1:], len(self.ids)], strict=True)
        return [position for start, end in bounds for position in range(end - start)][: self.length]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the first `length` tokens. A turn or step is rewarded at its last token."""
        tokens_of_turn: dict[int, list[int]] = {}
        for index, number in enumerate(self.turn_ids):
            tokens_of_turn.setdefault(number, []).append(index)
        rewards = [0.0] * self.length
        for number, turn in enumerate(self.turns, start=1):
            indices = tokens_of_turn[number]
            rewards[indices[-1]] += turn.reward or 0.0
            ends = self._step_ends(indices, turn.steps)
            for index, (_, reward) in zip(ends, turn.steps, strict=True):
                rewards[index] += reward
        return rewards

    @property
    def is_scored(self) -> bool:
        """True if any turn or step has a reward."""
        return any(turn.reward is not None or turn.steps for turn in self.turns)

    @property
    def parts(self) -> dict[str, float]:
        """Additional metrics, summed over the turns, and the last value of ``accuracy``."""
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.parts.items():
                total[name] = value if name == "accuracy" else total.get(name, 0.0) + value
        return total

    @property
    def forks(self) -> int:
        """Number of sequences after the first that contain sampled tokens."""
        length = self.length
        return sum(0 < start < length for start in self.starts)

    @property
    def text(self) -> str:
        """Transcript after the prompt, with roles and rewards in brackets."""
        lines = []
        for turn in self.turns:
            earned = "not scored" if turn.reward is None else f"{turn.reward:+.3g}"
            lines.append(f"{turn.content} [{earned}]")
            lines += [f"[{message['role']}] {message['content']}" for message in turn.answer]
        return "\n".join(lines)

    def append(self, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        """Append tokens that the policy sampled in turn number ``turn``, 0 for other tokens."""
        self.ids += ids
        self.logprobs += logprobs
        self.turn_ids += [turn] * len(ids)

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        self.append(ids, [0.0] * len(ids), turn=0)

    def fail(self, cause: str) -> None:
        """Mark the conversation as failed and remove its rewards. The sample then has reward 0."""
        for turn in self.turns:
            turn.reward, turn.parts, turn.steps = None, {}, []
        self.turns[-1].info = {"failure": cause}
        self.end_reason = "failed"

    def _step_ends(self, indices: Sequence[int], steps: Sequence[tuple[int, float]]) -> list[int]:
        """Return for each step the index of the token that completes it."""
        if not steps:
            return []
        # Decode in the context of the turn's sequence.
        start = max(start for start in self.starts if start <= indices[0])
        decoder = IncrementalDecoder(self.tokenizer, self.ids[start : indices[0]])
        pieces = (len(decoder.push(self.ids[index])) for index in indices)
        characters = list(accumulate(pieces))  # decoded up to each token of the turn
        # The end of a step may lie in a character that is not complete.
        return [indices[min(bisect_left(characters, end), len(indices) - 1)] for end, _ in steps]
