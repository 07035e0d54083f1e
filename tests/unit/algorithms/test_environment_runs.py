"""Runs and evaluations over games, agents that query the policy, and a user's kind of environment.

An evaluation with an environment has the numbers of validation, and conversations with turns.
"""

import pytest
import recipes
import test_ask
import toy_kind
import user_agents

from aligner.algorithms.rollout.rollout import VALIDATION_SEED_OFFSET
from aligner.errors import ConfigError
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration

AGENT = {"kind": "endpoint", "factory": f"{user_agents.__file__}:graded"}
TOY = {"kind": f"{toy_kind.__file__}:Toy", "factory": f"{toy_kind.__file__}:Game", "max_turns": 1}
GAMES = "aligner.examples.tasks.games"
ROWS = {"source": f"{GAMES}:guessing_games", "arguments": {"split": "validation", "size": 6}}
GAME = {"factory": f"{GAMES}:GuessingGame", "kwargs": {"guesses": 2}, "max_tokens": 100}
GAME["concurrency"] = 3


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"name": "a"}\n{"name": "b"}\n')
    return str(tmp_path / "rows.jsonl")


def metrics_of_a_step(script, tiny_nemo, folder, rows, environment, *overrides):
    given = [
        *(f"environment.{key}={value}" for key, value in environment.items()),
        *("reward=environment", f"data.train.source={rows}"),
        *("environment.max_tokens=200", "environment.concurrency=2"),
        *("model.ppo.length_params.max_length=6", "model.ppo.num_rollout_samples=4"),
        *("model.ppo.num_rollouts_per_prompt=2", "trainer.ppo.max_steps=1"),
        *("model.global_batch_size=4", "model.micro_batch_size=2"),
    ]
    metrics = {}
    for line in recipes.run(folder / "run", tiny_nemo, script, *given, *overrides):
        metrics |= line
    # The sampler's log-probs and the trainer's are of the same tokens.
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3
    return metrics


def test_a_step_over_agents(tiny_nemo, tmp_path, rows):
    more = [f"+data.validation.source={rows}"]
    more += ["critic.global_batch_size=4", "critic.micro_batch_size=2"]
    metrics = metrics_of_a_step("gpt_ppo", tiny_nemo, tmp_path, rows, AGENT, *more)
    for prefix in ("train_rollouts", "val_rollouts"):
        assert metrics[f"{prefix}/turns"] == 2
        assert metrics[f"{prefix}/ended_done"] == 1
        assert 0 < metrics[f"{prefix}/rewards"] <= 12.5


def test_a_step_over_another_kind(tiny_nemo, tmp_path, rows):
    metrics = metrics_of_a_step("gpt_reinforce", tiny_nemo, tmp_path, rows, TOY)
    assert metrics["train_rollouts/turns"] == metrics["train_rollouts/ended_done"] == 1
    assert metrics["train_rollouts/rewards"] == metrics["train_rollouts/generated_tokens"] / 4


def evaluated(tiny_nemo, folder, **changes):
    """`test_ask.evaluated` over games."""
    settings = {
        "data": {"prompts": ROWS},
        "sampling": {"max_length": 4, "samples_per_prompt": 2},
        "reward": {"kind": "environment"},
        "environment": GAME,
        "seed": 7 + VALIDATION_SEED_OFFSET,
        **changes,
    }
    return test_ask.evaluated(tiny_nemo, folder / "out", **settings)


def test_an_evaluation_over_agents(tiny_nemo, tmp_path, rows):
    data, agent = {"prompts": {"source": rows}}, {**AGENT, "max_tokens": 200}
    _, answers = evaluated(tiny_nemo, tmp_path, data=data, environment=agent)
    assert [len(answer["turns"]) for answer in answers] == [2] * 4
    assert [answer["end_reason"] for answer in answers] == ["done"] * 4
    assert {answer["columns"]["name"] for answer in answers} == {"a", "b"}


def validated(tiny_nemo, folder):
    """Metrics of the validation of a run that makes no step."""
    settings = {
        **{"trainer.rs.max_steps": 0, "seed": 7, "exp_manager.save_nemo": False},
        "model.rs": {"num_rollout_samples": 8, "length_params": {"max_length": 4}},
        **{"data": {"train": ROWS, "validation": ROWS}, "validation.samples_per_prompt": 2},
        **{"reward": {"kind": "environment"}, "environment": GAME},
    }
    run = test_ask.run_rs(folder / "run", str(tiny_nemo), settings)
    (line,) = read_metrics(run / "metrics.jsonl")
    prefix = "val_rollouts/"
    return {key.removeprefix(prefix): one for key, one in line.items() if key.startswith(prefix)}


def test_the_numbers_of_an_evaluation_are_those_of_validation(tiny_nemo, tmp_path):
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
def test_evaluations_that_cannot_work_are_refused(tiny_nemo, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        evaluated(tiny_nemo, tmp_path, **changes)
