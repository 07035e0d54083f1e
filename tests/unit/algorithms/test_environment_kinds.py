"""A kind of environment from outside of the library is sampled, trained on and checked."""

import json

import pytest
import toy_kind
from test_conf import composed

from aligner.algorithms.ask.evaluate import evaluate
from aligner.algorithms.ppo.trainer import train_ppo
from aligner.catalog import ENVIRONMENT_KINDS
from aligner.config import EvaluateConfig, load_config, parse_config
from aligner.errors import ConfigError
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration

TOY = f"{toy_kind.__file__}:Toy"
GAME = f"{toy_kind.__file__}:Game"


def test_a_step_of_training(tiny_nemo, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"name": "a"}\n{"name": "b"}\n')
    config = composed(
        "gpt_reinforce",
        [
            *("reward=environment", f"environment.kind={TOY}", f"environment.factory={GAME}"),
            *(f"model.restore_from_path={tiny_nemo}", "environment.max_turns=1"),
            *(f"data.train.source={tmp_path / 'rows.jsonl'}", "environment.concurrency=2"),
            *("model.ppo.length_params.max_length=6", "model.ppo.num_rollout_samples=4"),
            "environment.max_tokens=200",
            *("model.ppo.num_rollouts_per_prompt=2", "trainer.ppo.max_steps=1"),
            *("model.global_batch_size=4", "model.micro_batch_size=2"),
            f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
            "exp_manager.create_tensorboard_logger=false",
        ],
    )
    train_ppo(load_config(config))
    metrics = {}
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        metrics |= line
    assert metrics["train_rollouts/turns"] == metrics["train_rollouts/ended_done"] == 1
    assert metrics["train_rollouts/rewards"] == metrics["train_rollouts/generated_tokens"] / 4
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3


@pytest.mark.extended
def test_an_evaluation_with_a_kind_of_the_table(tiny_nemo, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT_KINDS, "toy", TOY)
    (tmp_path / "rows.jsonl").write_text('{"name": "a"}\n{"name": "b"}\n')
    values = {
        "model": {"restore_from_path": str(tiny_nemo)},
        "data": {"prompts": {"source": str(tmp_path / "rows.jsonl")}},
        "sampling": {"max_length": 6},
        "reward": {"kind": "environment"},
        "environment": {"kind": "toy", "factory": GAME, "max_tokens": 200, "max_turns": 1},
        "output": str(tmp_path / "out"),
    }
    evaluate(parse_config(values, EvaluateConfig))
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").open()]
    assert [answer["reward"] for answer in answers] == [
        answer["turns"][0]["tokens"] for answer in answers
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"environment.kind={TOY}"], "a toy has one turn"),
        (["environment.kind=mesages"], "environment.kind: must be one of .*mean messages"),
        (["environment.kind=no.such:Kind"], "environment.kind='no.such:Kind'"),
    ],
)
def test_what_a_kind_refuses(overrides, message):
    given = ["model.restore_from_path=m.nemo", "data.train.source=t.jsonl", "reward=environment"]
    with pytest.raises(ConfigError, match=message):
        load_config(composed("gpt_ppo", [*given, f"environment.factory={GAME}", *overrides]))
