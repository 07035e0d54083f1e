"""Values that no JSON holds, and objects with code inside, from environments and rewards.

They are converted, or cost a conversation or a refusal by name. The run does not die of them, and
no code of an object runs in the trainer.
"""

from campaigns.environments import played
from campaigns.harness import PPO, Campaign, run

# Expressions. The classes are those of `_CLASSES`, with a file's name for {mark}.
_VALUES = {
    "nan": "float('nan')",
    "infinity": "-float('inf')",
    "huge integer": "10**5000",
    "integer of 64 bits": "2**64 + 1",
    "int enum": "Small.ONE",
    "text enum": "Word.A",
    "numpy float": "numpy.float32(1.5)",
    "numpy nan": "numpy.float64('nan')",
    "numpy integer": "numpy.int64(3)",
    "numpy array": "numpy.zeros(3)",
    "surrogate": "'\\ud83d'",
    "control characters": "'\\x00\\x1b[2J\\u2028'",
    "bytes": "b'\\xff'",
    "set": "{1, 2}",
    "complex": "1j",
    "decimal": "decimal.Decimal('NaN')",
    "deep list": "deep()",
    "circle": "circle()",
    "long text": "'x' * 2**20",
    "text with code": "Text('x')",
    "number with code": "Number(1.0)",
    "object with code": "Thing()",
    "text that raises": "Raising('x')",
}
_PLACES = {
    "info": "return Turn(turn.messages, turn.reward, turn.done, {**turn.info, 'x': V})",
    "deep in info": (
        "return Turn(turn.messages, turn.reward, turn.done, {**turn.info, 'x': [{'y': V}]})"
    ),
    "key of info": "return Turn(turn.messages, turn.reward, turn.done, {**turn.info, V: 1})",
    "message": ("return Turn([{'role': 'user', 'content': V}], turn.reward, turn.done, turn.info)"),
    "field of a message": (
        "return Turn([{'role': 'user', 'content': 'a', 'name': V}], turn.reward, turn.done, "
        "turn.info)"
    ),
    "arguments of a call": (
        "return Turn([{'role': 'tool', 'content': 'a', 'tool_calls': [{'type': 'function', "
        "'function': {'name': 'f', 'arguments': {'x': V}}}]}], turn.reward, turn.done, turn.info)"
    ),
    "reward": "return Turn(turn.messages, V, turn.done, turn.info)",
    "done": "return Turn(turn.messages, turn.reward, V, turn.info)",
    "the turn": "return V",
    "exception": "raise ValueError(V)",
}
_REWARDS = {
    "a reward": "return [V] * len(prompts)",
    "a part": "return [{'reward': 1.0, 'x': V} for _ in prompts]",
    "a name of a part": "return [{'reward': 1.0, V: 1.0} for _ in prompts]",
    "rewards": "return V",
}
_CLASSES = """
import decimal, enum, os
import numpy

class Small(enum.IntEnum):
    ONE = 1

class Word(enum.StrEnum):
    A = "a"

class Code:
    def __reduce__(self):
        return os.system, ("touch '{mark}'",)

class Thing(Code):
    pass

class Text(Code, str):
    pass

class Number(Code, float):
    pass

class Raising(str):
    def __str__(self): raise RuntimeError('no text')
    __repr__ = __str__

def deep():
    value = []
    for _ in range(100_000): value = [value]
    return value

def circle():
    value = []
    value.append(value)
    return value
"""


def run_campaign(campaign: Campaign) -> None:
    """Put each value in one position of one conversation of eight, or of each reward."""
    cases = [(value, position) for value in _VALUES for position in (*_PLACES, *_REWARDS)]
    for value, position in campaign.while_time(cases):
        mark = campaign.folder / "code_was_run"
        classes = _CLASSES.replace("{mark}", str(mark))
        if position in _PLACES:
            good, note = _from_an_environment(campaign, _VALUES[value], position, classes)
        else:
            good, note = _from_a_reward(campaign, _VALUES[value], position, classes)
        if mark.exists():
            good, note = False, f"CODE WAS RUN; {note}"
            mark.unlink()
        campaign.record(f"{value} in {position}", good, note)


def _from_an_environment(
    campaign: Campaign, value: str, position: str, classes: str
) -> tuple[bool, str]:
    """Check that the conversation is a sample or restarted, or that a wrong type is refused."""
    marker = campaign.folder / "was_said"
    marker.unlink(missing_ok=True)
    body = f"V = {value}; {_PLACES[position]}\n{classes}"
    at = campaign.rng.randint(1, 3)
    samples, counted, outcome = played(
        campaign, "values", body, bad=campaign.rng.randrange(8), at=at, marker=str(marker)
    )
    good = outcome.verdict == "ok" and len(samples) == 8 and sum(counted.values()) <= 1
    good |= outcome.verdict == "refused" and "values.py:Game" in outcome.last
    return good, f"call {at}: {outcome.verdict}, {counted}; {outcome.last}"


def _from_a_reward(campaign: Campaign, value: str, position: str, classes: str) -> tuple[bool, str]:
    """Check that the run ends well, or is refused with the cause."""
    file, folder = campaign.folder / "rewards.py", campaign.fresh("rewards")
    head = "def reward(prompts, responses, ground_truths, **columns):\n"
    file.write_text(f"{head}    V = {value}; {_REWARDS[position]}\n{classes}")
    words = [*PPO, f"reward.function={file}:reward", "~reward.kwargs.pattern"]
    words += ["reward.time_limit_s=10", f"exp_manager.explicit_log_dir={folder}"]
    outcome = run(campaign, "train_gpt_ppo", words, timeout_s=90)
    return outcome.is_clean, f"{outcome.verdict}: {outcome.last}"
