"""A kind of environment from outside of the library is sampled, trained on and checked."""

import pytest
import toy_kind
from test_conf import composed
from test_endpoint_runs import BASE, answers_of_an_evaluation, metrics_of_a_step

from aligner.catalog import ENVIRONMENT_KINDS
from aligner.config import load_config
from aligner.errors import ConfigError

pytestmark = pytest.mark.integration

TOY = f"{toy_kind.__file__}:Toy"
GAME = f"{toy_kind.__file__}:Game"


def test_a_step_of_training(tiny_nemo, tmp_path):
    environment = {"kind": TOY, "factory": GAME, "max_turns": 1}
    metrics = metrics_of_a_step("gpt_reinforce", tiny_nemo, tmp_path, environment)
    assert metrics["train_rollouts/turns"] == metrics["train_rollouts/ended_done"] == 1
    assert metrics["train_rollouts/rewards"] == metrics["train_rollouts/generated_tokens"] / 4
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3


@pytest.mark.extended
def test_an_evaluation_with_a_kind_of_the_table(tiny_nemo, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT_KINDS, "toy", TOY)
    environment = {"kind": "toy", "factory": GAME, "max_turns": 1}
    answers = answers_of_an_evaluation(tiny_nemo, tmp_path, environment)
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
    with pytest.raises(ConfigError, match=message):
        load_config(composed("gpt_ppo", [*BASE, f"environment.factory={GAME}", *overrides]))
