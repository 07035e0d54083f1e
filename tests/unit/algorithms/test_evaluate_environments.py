"""An evaluation with an environment: the numbers of validation, and conversations with turns."""

import json

import pytest

from aligner.algorithms.ask.evaluate import evaluate
from aligner.algorithms.rollout.rollout import VALIDATION_SEED_OFFSET
from aligner.algorithms.rs.trainer import train_rs
from aligner.config import EvaluateConfig, RSRunConfig, parse_config
from aligner.errors import ConfigError
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration

GAMES = "aligner.examples.tasks.games"
ROWS = {"source": f"{GAMES}:guessing_games", "arguments": {"split": "validation", "size": 6}}
GAME = {"factory": f"{GAMES}:GuessingGame", "kwargs": {"guesses": 2}, "max_tokens": 100}
GAME["concurrency"] = 3


def evaluated(tiny_nemo, folder, **changes):
    values = {
        "model": {"restore_from_path": str(tiny_nemo)},
        "data": {"prompts": ROWS},
        "sampling": {"max_length": 4, "samples_per_prompt": 2},
        "reward": {"kind": "environment"},
        "environment": GAME,
        "seed": 7 + VALIDATION_SEED_OFFSET,
        "output": str(folder / "out"),
        **changes,
    }
    evaluate(parse_config(values, EvaluateConfig))
    numbers = json.loads((folder / "out" / "evaluation.json").read_text())
    return numbers["sets"], [json.loads(line) for line in (folder / "out/answers.jsonl").open()]


def validated(tiny_nemo, folder):
    """Metrics of the validation of a run that makes no step."""
    rs = {"num_rollout_samples": 8, "length_params": {"max_length": 4}}
    sizes = {"global_batch_size": 1, "micro_batch_size": 1}
    nothing_else = {"create_tensorboard_logger": False, "save_nemo": False}
    values = {
        "model": {"restore_from_path": str(tiny_nemo), "rs": rs, **sizes},
        "trainer": {"rs": {"max_steps": 0}},
        "data": {"train": ROWS, "validation": ROWS},
        "validation": {"samples_per_prompt": 2},
        "reward": {"kind": "environment"},
        "environment": GAME,
        "seed": 7,
        "exp_manager": {"explicit_log_dir": str(folder / "run"), **nothing_else},
    }
    train_rs(parse_config(values, RSRunConfig))
    (line,) = read_metrics(folder / "run" / "metrics.jsonl")
    prefix = "val_rollouts/"
    return {key.removeprefix(prefix): one for key, one in line.items() if key.startswith(prefix)}


def test_the_numbers_are_those_of_validation(tiny_nemo, tmp_path):
    sets, lines = evaluated(tiny_nemo, tmp_path)
    asked, expected = sets["prompts"], validated(tiny_nemo, tmp_path)
    assert {"turns", "ended_done", "failed_env_error", "accuracy"} <= asked["metrics"].keys()
    for name, value in asked["metrics"].items():
        assert expected[name] == pytest.approx(value), name
    for name in ("mean@2", "pass@1", "pass@2"):
        assert expected[name.replace("@", "_at_")] == asked["estimates"][name]["value"]
    assert [line["sample"] for line in lines] == [0, 1] * 6
    for line in lines:
        assert line["prompt"].count("1-9?") == 1
        assert 1 <= len(line["turns"]) <= 2
        assert line["reward"] == pytest.approx(sum(turn["reward"] for turn in line["turns"]))
        assert line["end_reason"] == "done"
        assert 1 <= line["columns"]["secret"] <= 9
    page = (tmp_path / "out" / "report.html").read_text()
    assert lines[0]["turns"][0]["answer"][0]["content"] in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": {"function": "a.b"}}, r"reward\.kind=function and environment\.factory="),
        ({"environment": {**GAME, "max_tokens": 4}}, r"=4 leaves .* sampling\.max_length=4"),
        ({"environment": {**GAME, "max_tokens": 9999}}, r"max_tokens=9999, .* 256 positions"),
        ({"environment": {**GAME, "factory": f"{GAMES}:Chess"}}, "has no class 'Chess'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny_nemo, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        evaluated(tiny_nemo, tmp_path, **changes)
