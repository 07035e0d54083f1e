"""Estimators and surrogates from outside of the library: what they get and give."""

import pytest
import torch
from test_credit import assign, credit, rollout
from user_code import configured, directory_with

from aligner.algorithms.ppo.build import make_estimator, make_policy_loss
from aligner.algorithms.ppo.credit import Credit
from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.catalog import ESTIMATORS, SURROGATES, EstimatorEntry, SurrogateEntry
from aligner.config.algorithms.names import algorithm_of
from aligner.errors import ConfigError
from aligner.types import Denominators, TokenOutputs

OWN = """
import torch


def good(rewards, groups, token_mask, scale=1.0):
    mean = torch.zeros_like(rewards)
    for group in groups.unique():
        mean[groups == group] = rewards[groups == group].mean()
    return scale * (rewards - mean)[:, None] * token_mask


def spread(rewards):
    return rewards


def writes(rewards, token_mask):
    token_mask.fill_(5.0)
    return rewards


def everything(**given):
    return torch.full_like(given["token_mask"], float(len(given)))


def wants_more(rewards, difficulty):
    return rewards


def wants_values(values):
    return values


def wrong_shape(rewards, token_mask):
    return token_mask[:, 1:]


def not_finite(rewards):
    return rewards / 0


def raises(rewards):
    raise KeyError("gone")


def pair(rewards):
    return rewards, rewards
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    yield from directory_with(tmp_path, monkeypatch, "my_estimators", OWN)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grppo", ["Did you mean grpo", "package.module:function"]),
        ("my_estimators.py:gone", ["has no function 'gone'", "good"]),
        ("my_estimators.py:wants_more", ["difficulty", "trainer.ppo.advantage.kwargs", "rewards"]),
        ("my_estimators.py:wants_values", ["values", "only in a run with a critic"]),
        ("my_estimators.py:wrong_shape", ["a tensor [4, 5] for 4 responses", "float [4, 6]"]),
        ("my_estimators.py:not_finite", ["response 0 of 4 is NaN or infinite"]),
        ("my_estimators.py:raises", ["KeyError", "my_estimators.py, line", "arguments rewards"]),
        ("my_estimators.py:pair", ["returned tuple. Return a tensor"]),
    ],
)
def test_an_estimator_that_cannot_work_is_refused(here, name, words):
    with pytest.raises(ConfigError) as caught:
        make_estimator(configured(trainer__ppo__advantage__estimator=name))
    for word in ("trainer.ppo.advantage.estimator", name, *words):
        assert word in str(caught.value)


def test_options_that_an_estimator_does_not_read_are_refused(here):
    good = {"trainer__ppo__advantage__estimator": "my_estimators.py:good"}
    assert make_estimator(configured(**good)) is not None
    with pytest.raises(ConfigError, match=r"discount_factor=0\.9.*does not accept"):
        make_estimator(configured(**good, trainer__ppo__discount_factor=0.9))
    with pytest.raises(ConfigError, match=r"critic_warmup_steps=2 needs a critic"):
        configured(**good, trainer__ppo__critic_warmup_steps=2)
    with pytest.raises(ConfigError, match=r"advantage\.kwargs=.*estimator=rloo"):
        configured(trainer__ppo__advantage__kwargs={"scale": 2.0})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shift'"):
        make_estimator(configured(**good, trainer__ppo__advantage__kwargs={"shift": 2.0}))
    assert configured(**good).algorithm == "Policy gradients (my_estimators.py:good)"


def own(name):
    estimator = UserEstimator(f"my_estimators.py:{name}", {}, has_critic=False)
    return Credit(credit("rloo").trainer, False, 2, 4, estimator)


def test_what_an_estimator_gets_and_gives(here):
    batch = rollout([1, 0], [3, 1])
    assign(own("spread"), batch)
    assert torch.equal(batch["advantages"], torch.tensor([1.0, 0.0])[:, None] * batch["token_mask"])
    batch = rollout([1, 0], [3, 1])
    before = batch["token_mask"].clone()
    assign(own("writes"), batch)
    assert torch.equal(batch["token_mask"], before)
    batch = rollout([1, 0], [3, 1])
    batch["prev_logprobs"] = batch["generation_logprobs"] = torch.zeros_like(batch["token_mask"])
    assign(own("everything"), batch)
    assert batch["advantages"].max() == 13


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


@pytest.mark.parametrize("key", ["model.ppo.surrogate", "trainer.ppo.advantage.estimator"])
def test_an_unknown_name_lists_the_rows(toys, key):
    with pytest.raises(ConfigError, match=rf"{key}.*toys(.|\n)*Did you mean toy\?"):
        configured(**{key.replace(".", "__"): "toys"})
