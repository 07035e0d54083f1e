"""A conversation of ``samples.jsonl``, message by message, as the pages show it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from aligner.observe.report.chart import short_number
from aligner.observe.samples import Sample

_POLICY = "assistant"


class Message(NamedTuple):
    """One message. ``is_trained``: the policy sampled its tokens; all others are masked."""

    role: str
    note: str  # what became of it, and what it earned
    text: str
    calls: str  # of tools, a line each
    is_trained: bool


def messages_of(sample: Sample) -> list[Message]:
    """The messages behind the prompt, in their order; none where it is a single response."""
    turns = sample.turns or []
    return [
        message
        for number, turn in enumerate(turns, start=1)
        for message in _of_turn(number, turn, is_last=number == len(turns))
    ]


def _of_turn(number: int, turn: Mapping[str, Any], is_last: bool) -> Iterator[Message]:
    notes = [f"turn {number}", f"{turn.get('tokens', '?')} tokens, trained"]
    if turn.get("ended") is False:
        notes.append("cut")
    notes.append(_earned(turn))
    info = dict(turn.get("info") or {})
    calls = str(info.pop("calls", ""))
    notes += [f"{name}: {value}" for name, value in info.items()]
    yield Message(_POLICY, " · ".join(notes), _text(turn), calls, True)
    for answer in turn.get("answer") or []:
        note = "behind the end, not read" if is_last else "read, masked"
        yield Message(str(answer.get("role", "?")), note, _text(answer), "", False)


def _earned(turn: Mapping[str, Any]) -> str:
    reward = turn.get("reward")
    steps = [f"{value:+.3g} at {end}" for end, value in turn.get("steps") or []]
    parts = [f"{name} {short_number(value)}" for name, value in (turn.get("parts") or {}).items()]
    earned = [] if reward is None else [f"reward {reward:+.3g}"]
    if steps:
        earned.append(f"steps {', '.join(steps)}")
    return ", ".join([*(earned or ["not scored"]), *parts])


def _text(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "")
