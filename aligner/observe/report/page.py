"""HTML pages without external files, from the Jinja2 templates in ``templates/``."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aligner.observe.metrics import Sample
from aligner.observe.report.chart import short_number

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates(folder: Path | None = None) -> "Environment":
    """Return a Jinja2 environment for HTML, with templates of the library and of ``folder``."""
    import jinja2  # only needed by runs that end with a page

    folders = [] if folder is None else [jinja2.FileSystemLoader(folder)]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("aligner.observe.report"), *folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = short_number
    environment.filters["messages"] = messages_of
    return environment


def render(template: str, *, folder: Path | None = None, **values: Any) -> str:
    """Return ``template`` filled with ``values``. ``folder``: its folder. None: the library's."""
    return templates(folder).get_template(template).render(**values)


class Message(NamedTuple):
    """A message of a conversation, as the report shows it."""

    role: str
    note: str  # outcome and reward
    text: str
    calls: str  # tool calls, one per line
    is_trained: bool  # the policy sampled it. Other messages are masked


def messages_of(sample: Sample) -> list[Message]:
    """Return the messages after the prompt. Empty if the sample is a single response."""
    messages, turns = list[Message](), sample.turns or []
    for number, turn in enumerate(turns, start=1):
        # The policy's message, with its length, rewards and tool calls.
        notes = [f"turn {number}", f"{turn.get('tokens', '?')} tokens, trained"]
        if turn.get("ended") is False:
            notes.append("cut")
        info = dict(turn.get("info") or {})
        calls, text = str(info.pop("calls", "")), str(turn.get("content") or "")
        notes += [_rewards_of(turn), *(f"{name}: {value}" for name, value in info.items())]
        messages.append(Message("assistant", " · ".join(notes), text, calls, True))
        # The messages that answer it.
        note = "after the end, not read" if number == len(turns) else "read, masked"
        for message in turn.get("answer") or []:
            role, text = str(message.get("role", "?")), str(message.get("content") or "")
            messages.append(Message(role, note, text, "", False))
    return messages


def _rewards_of(turn: Mapping[str, Any]) -> str:
    reward = turn.get("reward")
    steps = [f"{value:+.3g} at {end}" for end, value in turn.get("steps") or []]
    rewards = [] if reward is None else [f"reward {reward:+.3g}"]
    if steps:
        rewards.append(f"steps {', '.join(steps)}")
    parts = [f"{name} {short_number(value)}" for name, value in (turn.get("parts") or {}).items()]
    return ", ".join([*(rewards or ["not scored"]), *parts])
