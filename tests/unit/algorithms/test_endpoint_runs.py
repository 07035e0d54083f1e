"""Runs over agents that query the policy, and over a kind of environment from outside."""

import json
import sys

import pytest
import toy_kind
import user_agents
from recipes import composed

from aligner.algorithms.ask.evaluate import evaluate
from aligner.algorithms.ppo.trainer import train_ppo
from aligner.config import EvaluateConfig, load_config, parse_config
from aligner.errors import ConfigError
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration

AGENT = {"kind": "endpoint", "factory": f"{user_agents.__file__}:graded"}
AHEAD = [
    *("generation.async_rollouts=true", "generation.backend=vllm", "cluster.engine=ray"),
    *("model.ppo.correction.weights=token", f"generation.vllm.python={sys.executable}"),
]
BASE = ["model.restore_from_path=m.nemo", "data.train.source=t.jsonl", "reward=environment"]


def rows_in(folder):
    (folder / "rows.jsonl").write_text('{"name": "a"}\n{"name": "b"}\n')
    return folder / "rows.jsonl"


def metrics_of_a_step(script, tiny_nemo, folder, environment, *overrides):
    rows = rows_in(folder)
    given = [
        *(f"environment.{key}={value}" for key, value in environment.items()),
        *("reward=environment", f"model.restore_from_path={tiny_nemo}"),
        *("environment.max_tokens=200", "environment.concurrency=2", f"data.train.source={rows}"),
        *("model.ppo.length_params.max_length=6", "model.ppo.num_rollout_samples=4"),
        *("model.ppo.num_rollouts_per_prompt=2", "trainer.ppo.max_steps=1"),
        *("model.global_batch_size=4", "model.micro_batch_size=2"),
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "exp_manager.create_tensorboard_logger=false",
        *overrides,
    ]
    train_ppo(load_config(composed(script, *given)))
    metrics = {}
    for line in read_metrics(folder / "run" / "metrics.jsonl"):
        metrics |= line
    return metrics


def answers_of_an_evaluation(tiny_nemo, folder, environment, **sampling):
    values = {
        "model": {"restore_from_path": str(tiny_nemo)},
        "data": {"prompts": {"source": str(rows_in(folder))}},
        "sampling": {"max_length": 6, **sampling},
        "reward": {"kind": "environment"},
        "environment": {**environment, "max_tokens": 200},
        "output": str(folder / "out"),
    }
    evaluate(parse_config(values, EvaluateConfig))
    return [json.loads(line) for line in (folder / "out" / "answers.jsonl").open()]


def test_a_step(tiny_nemo, tmp_path):
    more = [f"+data.validation.source={tmp_path / 'rows.jsonl'}"]
    more += ["critic.global_batch_size=4", "critic.micro_batch_size=2"]
    metrics = metrics_of_a_step("gpt_ppo", tiny_nemo, tmp_path, AGENT, *more)
    for prefix in ("train_rollouts", "val_rollouts"):
        assert metrics[f"{prefix}/turns"] == 2
        assert metrics[f"{prefix}/ended_done"] == 1
        assert 0 < metrics[f"{prefix}/rewards"] <= 12.5
    # The sampler's log-probs and the trainer's are of the same tokens.
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3


def test_an_evaluation(tiny_nemo, tmp_path):
    answers = answers_of_an_evaluation(tiny_nemo, tmp_path, AGENT, samples_per_prompt=2)
    assert [len(answer["turns"]) for answer in answers] == [2] * 4
    assert [answer["end_reason"] for answer in answers] == ["done"] * 4
    assert {answer["columns"]["name"] for answer in answers} == {"a", "b"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "kind=endpoint needs an agent"),
        (["environment.command=a", "environment.factory=b.py:c"], "environment.factory=b.py:c"),
        (["environment.command=''"], "is empty. Set a program"),
        (['environment.command="a \'b"'], "No closing quotation. Write it as a list of words"),
        (["environment.kind=messages", "environment.command=a"], "Set environment.kind=endpoint"),
        (["environment.command=a", "environment.rewritten_history=keep"], "rewritten_history=fork"),
        ([*AHEAD, "environment.command=a"], "agents get answers only while no training runs"),
        (["environment.command=a", "reward=function", "reward.function=a.b:f"], "or neither"),
        (["environment.command=[1]"], "expected a string, got 1"),
    ],
)
def test_what_cannot_work_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(composed("gpt_ppo", *BASE, "environment.kind=endpoint", *overrides))


def test_a_command_is_a_text_or_words():
    text, words = "'python my.py -a \"b c\"'", "[python,my.py,-a,b c]"
    for given in (f"environment.command={text}", f"environment.command={words}"):
        config = load_config(composed("gpt_ppo", *BASE, "environment.kind=endpoint", given))
        assert config.environment.words == ["python", "my.py", "-a", "b c"]
        assert config.environment.setting == "environment.command=\"python my.py -a 'b c'\""


TOY = f"{toy_kind.__file__}:Toy"
GAME = f"{toy_kind.__file__}:Game"


def test_a_step_over_another_kind(tiny_nemo, tmp_path):
    environment = {"kind": TOY, "factory": GAME, "max_turns": 1}
    metrics = metrics_of_a_step("gpt_reinforce", tiny_nemo, tmp_path, environment)
    assert metrics["train_rollouts/turns"] == metrics["train_rollouts/ended_done"] == 1
    assert metrics["train_rollouts/rewards"] == metrics["train_rollouts/generated_tokens"] / 4
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"environment.kind={TOY}"], "a toy has one turn"),
        (["environment.kind=mesages"], "environment.kind: must be one of .*mean messages"),
        (["environment.kind=no.such:Kind"], "environment.kind='no.such:Kind'"),
    ],
)
def test_what_a_kind_refuses(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(composed("gpt_ppo", *BASE, f"environment.factory={GAME}", *overrides))
