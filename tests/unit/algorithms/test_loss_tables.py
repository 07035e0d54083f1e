"""A surrogate and an estimator from outside of the library, each one row of a table."""

import pytest
import torch
from test_credit import assign, rollout
from user_code import configured, directory_with

from aligner.algorithms.ppo.build import make_estimator, make_policy_loss
from aligner.algorithms.ppo.credit import Credit
from aligner.catalog import ESTIMATORS, SURROGATES, EstimatorEntry, SurrogateEntry
from aligner.config.algorithms.names import algorithm_of
from aligner.errors import ConfigError
from aligner.types import Denominators, TokenOutputs

TOYS = """
def vanilla(loss, ratio, advantages, logprobs, mean):
    return -advantages * logprobs, {"ppo_ratio_clamped": mean(ratio)}


def doubled(rewards, scale=2.0):
    return scale * rewards
"""


@pytest.fixture
def toys(tmp_path, monkeypatch):
    monkeypatch.setitem(SURROGATES, "toy", SurrogateEntry("toys:vanilla", "Toy"))
    entry = EstimatorEntry("Toy estimator", compares_group=True, function="toys.py:doubled")
    monkeypatch.setitem(ESTIMATORS, "toy", entry)
    yield from directory_with(tmp_path, monkeypatch, "toys", TOYS)


def test_a_surrogate_is_a_row_and_a_function(toys, monkeypatch):
    monkeypatch.syspath_prepend(str(toys))
    config = configured(model__ppo__surrogate="toy")
    loss_function = make_policy_loss(config)
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    batch = {
        "advantages": torch.tensor([[3.0, 5.0]]),
        "token_mask": torch.tensor([[0.0, 1.0]]),
        "sample_mask": torch.ones(1),
    }
    outputs = TokenOutputs(logprobs, torch.zeros(1, 2))
    loss, _ = loss_function(outputs, batch, Denominators(torch.tensor(1.0), torch.tensor(1.0)))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss == 10
    assert gradient.tolist() == [[0, -5]]
    assert algorithm_of(config.as_dict()).name == "RLOO (Toy)"


def test_an_estimator_is_a_row_and_a_function(toys):
    with pytest.raises(ConfigError, match=r"num_rollouts_per_prompt=1"):
        configured(trainer__ppo__advantage__estimator="toy", model__ppo__num_rollouts_per_prompt=1)
    config = configured(
        trainer__ppo__advantage__estimator="toy", trainer__ppo__advantage__kwargs={"scale": 3.0}
    )
    batch = rollout([1.0, 0.0], lengths=[4, 3])
    credit = Credit(config.trainer.ppo, False, 2, 4, make_estimator(config))
    assign(credit, batch)
    assert batch["advantages"][0].amax() == 3
    assert algorithm_of(config.as_dict()).name == "Toy estimator"


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("model__ppo__surrogate", r"model\.ppo\.surrogate.*toys"),
        ("trainer__ppo__advantage__estimator", r"trainer\.ppo\.advantage\.estimator.*toys"),
    ],
)
def test_an_unknown_name_lists_the_rows(toys, key, pattern):
    with pytest.raises(ConfigError, match=pattern) as raised:
        configured(**{key: "toys"})
    assert "Did you mean toy?" in str(raised.value)
