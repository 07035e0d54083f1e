"""Trajectory of a conversation: its tokens, those of them that were sampled, and its turns."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from aligner.data.chat import Message
from aligner.data.tokenizers.decoding import IncrementalDecoder
from aligner.data.tokenizers.tokenizer import Tokenizer

EndReason = Literal["done", "max_turns", "max_tokens", "failed"]


@dataclass
class TurnRecord:
    """A turn: the policy's message, what it earned, and what was said to it."""

    content: str
    tokens: int
    ended: bool
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    answer: list[Message] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # end in characters, reward


class KeptTokens(NamedTuple):
    """Tokens that top-k and top-p kept, for each that a turn sampled."""

    place: int  # of the first token in the row
    ids: Tensor  # int32 [n, K]


@dataclass
class Trajectory:
    """Record of a conversation; lists of numbers have one value a token.

    ``prompt``: text before the first turn. ``ids``: of all sequences one after the other; there are
    several if it forked. ``starts``: where each begins. ``logprobs``: of the tokens that were
    sampled, 0 of the others. ``turn_ids``: number of the turn that sampled a token, from 1; 0: none
    did. ``failures``: reasons of earlier attempts at it.
    """

    tokenizer: Tokenizer
    prompt: str = ""
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)
    end_reason: EndReason = "done"
    failures: list[str] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first that was sampled."""
        return self.turn_ids.index(1) if self.turns else len(self.ids)

    @property
    def length(self) -> int:
        """Number of tokens up to the last that was sampled: what follows it trains nothing."""
        return 1 + max((at for at, turn in enumerate(self.turn_ids) if turn), default=-1)

    @property
    def positions(self) -> list[int]:
        """Position of each token up to `length` in its sequence, from 0."""
        bounds = zip(self.starts, [*self.starts[1:], len(self.ids)], strict=True)
        return [position for start, end in bounds for position in range(end - start)][: self.length]

    @property
    def rewards(self) -> list[float]:
        """Reward of each token up to `length`.

        The reward of a turn is that of its last token, and of a step that of the token which
        completes it; others have 0.
        """
        places: dict[int, list[int]] = {}
        for at, number in enumerate(self.turn_ids):
            places.setdefault(number, []).append(at)
        rewards = [0.0] * self.length
        for number, turn in enumerate(self.turns, start=1):
            rewards[places[number][-1]] += turn.reward or 0.0
            for at, (_, reward) in zip(
                self._step_ends(places[number], turn.steps), turn.steps, strict=True
            ):
                rewards[at] += reward
        return rewards

    @property
    def is_scored(self) -> bool:
        """True if anything of it has a reward."""
        return any(turn.reward is not None or turn.steps for turn in self.turns)

    @property
    def parts(self) -> dict[str, float]:
        """Further numbers of the turns: their sums, and of ``accuracy`` the last."""
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.parts.items():
                total[name] = value if name == "accuracy" else total.get(name, 0.0) + value
        return total

    @property
    def forks(self) -> int:
        """Number of further sequences in which the policy said something."""
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

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        self.sampled(ids, [0.0] * len(ids), 0)

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        """Append tokens of a turn."""
        self.ids += ids
        self.logprobs += logprobs
        self.turn_ids += [turn] * len(ids)

    def fail(self, cause: str) -> None:
        """Make it a sample of reward 0, whatever it earned before."""
        for turn in self.turns:
            turn.reward, turn.parts, turn.steps = None, {}, []
        self.turns[-1].info = {"failure": cause}
        self.end_reason = "failed"

    def _step_ends(self, places: Sequence[int], steps: Sequence[tuple[int, float]]) -> list[int]:
        """Token of a turn, at consecutive ``places``, that completes each of its steps."""
        if not steps:
            return []
        start = max(start for start in self.starts if start <= places[0])
        decoder = IncrementalDecoder(self.tokenizer, self.ids[start : places[0]])
        characters: list[int] = []
        count = 0
        for at in places:
            count += len(decoder.push(self.ids[at]))
            characters.append(count)
        return [
            places[min(bisect_left(characters, end), len(places) - 1)]  # it may be incomplete
            for end, _ in steps
        ]
