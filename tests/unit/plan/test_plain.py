"""Values of users' code as JSON: the rules, and the files that such values are written to."""

import enum
import json
import math

import numpy as np
import pytest

from aligner.environments import Start, Turn
from aligner.environments.protocol import check_start, check_turn
from aligner.observe.jsonl import dump_line
from aligner.plain import plain


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    YES = "yes"


class Name(str):
    __slots__ = ()

    def __str__(self):
        return "another"

    def __reduce__(self):
        return exec, ("raise SystemExit(7)",)


class Unshown:
    def __repr__(self):
        raise RuntimeError


NESTED = []
NESTED.append(NESTED)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (0.1 + 0.2, 0.1 + 0.2),
        (-0.0, -0.0),
        (5e-324, 5e-324),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (2**64 - 1, 2**64 - 1),
        (2**64, str(2**64)),
        (10**5000, "a int"),
        (Level.LOW, 1),
        (Colour.RED, "red"),
        (Word.YES, "yes"),
        (Name("y"), "y"),
        ("\ud83d", "?"),
        (np.float32(0.5), 0.5),
        (np.float64(math.nan), "NaN"),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.ones((1, 2)), [[1.0, 1.0]]),
        ({1: (1, {2})}, {"1": [1, [2]]}),
        ({Colour.RED: b"a"}, {"red": "b'a'"}),
        (Unshown(), "a Unshown"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rules(value, expected):
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)
    assert repr(json.loads(json.dumps(found, allow_nan=False))) == repr(expected)  # -0.0 too


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 10**5000, Level.LOW, Name("y"), "\ud800", np.float32(1), NESTED],
    ids=lambda value: type(value).__name__,
)
def test_turns_and_starts_are_plain_wherever_it_stands(value):
    call = {"name": "f", "arguments": {"x": value}}
    said = [{"role": "user", "content": Name("a"), "tool_calls": [call]}]
    turn = check_turn(Turn(said, 1.0, True, info={"x": value}))
    start = check_start(Start(said, [{"name": "f", "default": value}]))
    for found in (vars(turn), vars(start)):
        json.dumps(found, allow_nan=False).encode()
    assert type(turn.messages[0]["content"]) is str
    assert type(turn.info["x"]) in (int, float, str)


def test_lines_and_parts_hold_hostile_values_at_every_depth():
    assert json.dumps(plain(NESTED)).count("[") < 70
    line = dump_line({"step": 1, "turns": [{"info": {"x": math.nan, "n": 10**5000}}]})
    assert json.loads(line)["turns"][0]["info"] == {"x": "NaN", "n": "a int"}
    parts = {"nan": math.nan, "big": 10**5000, "level": Level.LOW, "half": np.float32(0.5)}
    turn = check_turn(Turn(reward={"reward": 1, **parts}, done=True))
    assert turn.parts == {"level": 1.0, "half": 0.5}  # finite parts
