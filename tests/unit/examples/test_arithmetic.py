"""The arithmetic task: right answers, disjoint problems, nothing leaked."""

import re

import pytest

from aligner.errors import ConfigError
from aligner.examples.tasks.arithmetic import (
    Problem,
    arithmetic_examples,
    arithmetic_labels,
    arithmetic_pairs,
    arithmetic_prompts,
    split_problems,
)


def parse(line):
    a, operator, b, answer = re.fullmatch(r"(\d+)([-+*])(\d+)=(.*)", line).groups()
    return Problem(int(a), operator, int(b)), answer


@pytest.mark.parametrize(("operators", "shots"), [(["-"], 3), (["*"], 0), (["+", "-", "*"], 3)])
def test_prompts_are_right_and_leak_nothing(operators, shots):
    asked: dict[str, set[Problem]] = {}
    train_problems = split_problems(
        seed=5, low=0, high=9, operators=operators, validation_fraction=0.25
    )["train"]
    for split in ("train", "validation"):
        for row in arithmetic_prompts(split, 300, seed=5, high=9, operators=operators, shots=shots):
            *examples, question = row["prompt"].split("\n")
            problem, nothing = parse(question)
            assert nothing == ""
            assert (row["a"], row["operator"], row["b"]) == problem
            assert row["ground_truth"] == str(eval(f"{problem.a}{problem.operator}{problem.b}"))
            asked.setdefault(split, set()).add(problem.canonical)
            shown = [parse(example) for example in examples]
            assert len({example.canonical for example, _ in shown}) == shots
            for example, answer in shown:
                assert int(answer) == eval(f"{example.a}{example.operator}{example.b}") >= 0
                assert answer != row["ground_truth"]
                assert example.canonical != problem.canonical
                assert example in train_problems
    assert not asked["train"] & asked["validation"]


def test_every_problem_is_asked_once_per_round():
    pools = split_problems(seed=0, low=0, high=9, operators="+", validation_fraction=0.25)
    count = len(pools["train"])
    assert count + len(pools["validation"]) == 100
    rows = list(arithmetic_prompts("train", 2 * count, high=9))
    first = [(row["a"], row["b"]) for row in rows[:count]]
    second = [(row["a"], row["b"]) for row in rows[count:]]
    assert len(set(first)) == count
    assert sorted(first) == sorted(second)
    assert first != second


def test_same_seed_same_rows_whatever_the_size_in_any_format():
    few = list(arithmetic_prompts("train", 10, seed=3))
    many = list(arithmetic_prompts("train", 500, seed=3))
    assert many[:10] == few
    assert list(arithmetic_prompts("train", 10, seed=4)) != few
    # written down once: another machine, another Python, the same prompts
    assert few[0]["prompt"] == "0+11=11\n4+12=16\n4+1="
    form = {"question": "{a} {operator} {b} =", "answer": " {answer}", "separator": "\n\n"}
    row = next(arithmetic_prompts("train", 1, seed=3, **form))
    assert row["prompt"] == "0 + 11 = 11\n\n4 + 12 = 16\n\n4 + 1 ="
    assert row["ground_truth"] == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split='test'"),
        ({"operators": ["/"]}, "operators="),
        ({"low": 5, "high": 4}, "low=5"),
        ({"low": -1}, "low=-1"),
        ({"size": 0}, "size=0"),
        ({"shots": -1}, "shots=-1"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"high": 0}, "cannot be split"),
        ({"high": 2, "shots": 10}, "shots=10"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        list(arithmetic_prompts(**{"split": "train", "size": 4, **arguments}))


def test_worked_examples_pairs_and_labels_ask_the_same():
    asked = list(arithmetic_prompts("validation", 40, seed=3))
    worked = list(arithmetic_examples(split="validation", size=40, seed=3))
    pairs = list(arithmetic_pairs(split="validation", size=40, seed=3))
    for row, example, pair in zip(asked, worked, pairs, strict=True):
        assert row["prompt"] == example["prompt"] == pair["prompt"]
        assert row["ground_truth"] == example["response"] == pair["chosen"]
        assert 1 <= abs(int(pair["rejected"]) - int(pair["chosen"])) <= 9
        assert int(pair["rejected"]) >= 0
    assert len({int(p["rejected"]) - int(p["chosen"]) for p in pairs}) > 5
    assert pairs == list(arithmetic_pairs(split="validation", size=40, seed=3))
    # Labels are of right and wrong answers in turn.
    labelled = list(arithmetic_labels(split="validation", size=40, seed=3))
    for number, (pair, row) in enumerate(zip(pairs, labelled, strict=True)):
        assert (row["prompt"], row["label"]) == (pair["prompt"], number % 2 == 0)
        assert row["response"] == pair["chosen" if row["label"] else "rejected"]


def test_how_far_wrong_answers_are():
    pairs = list(arithmetic_pairs(size=60, high=9, wrong_by=[20, 30]))
    steps = {abs(int(pair["rejected"]) - int(pair["chosen"])) for pair in pairs}
    assert min(steps) >= 20
    assert max(steps) <= 30
    with pytest.raises(ConfigError, match="wrong_by="):
        next(arithmetic_pairs(size=1, wrong_by=[0, 3]))
