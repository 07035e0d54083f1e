"""Token rewards, GAE, masked reductions and estimates of the KL: by hand and in plain Python."""

import math

import pytest
import torch

from aligner.algorithms.ppo.credit import KLController
from aligner.errors import ConfigError
from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.masked import masked_sum, masked_whiten
from aligner.losses.policy import kl_estimate

NAN = float("nan")


def test_token_rewards_by_hand():
    rewards = torch.tensor([1.0, -2.0, 5.0])
    kl = torch.tensor([[9.0, 0.5, 0.25, 9.0], [NAN, 9.0, 9.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    expected = torch.tensor([[0.0, -0.05, 0.975, 0.0], [0.0, 0, 0, -2.1], [0, 0, 0, 0]])
    torch.testing.assert_close(token_rewards(rewards, kl, mask, beta=0.1), expected)
    mask = torch.tensor([[1, 0, 1, 0]])
    assert token_rewards(torch.tensor([3.0]), None, mask, 0.0).tolist() == [[0.0, 0.0, 3.0, 0.0]]


def _loop(values, rewards, mask, gamma, lam):
    """The recursion, one token at a time."""
    advantages = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        next_value = next_advantage = 0.0
        for t in reversed(range(len(row))):
            if not row[t]:
                continue
            delta = rewards[b][t] + gamma * next_value - values[b][t]
            next_advantage = advantages[b][t] = delta + gamma * lam * next_advantage
            next_value = values[b][t]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("length", [1, 31, 100])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gae_against_a_loop(gamma, lam, length, share):
    generator = torch.Generator().manual_seed(length)
    values, rewards = torch.randn(2, 4, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, length, generator=generator) < share
    mask[2] = False  # a sample without a generated token
    expected = torch.tensor(
        _loop(values.tolist(), rewards.tolist(), mask.tolist(), gamma, lam), dtype=torch.float64
    )
    garbage = torch.where(mask, 0.0, NAN)
    advantages, returns = generalized_advantage_estimate(
        values + garbage, rewards + garbage, mask, gamma, lam
    )
    torch.testing.assert_close(advantages, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0))


def test_gae_of_long_float32_rows_of_bfloat16_and_of_no_rows():
    generator = torch.Generator().manual_seed(3)
    values, rewards = torch.randn(2, 2, 4096, generator=generator)
    mask = torch.ones(2, 4096)
    exact = generalized_advantage_estimate(values.double(), rewards.double(), mask, 1.0, 1.0)
    single = generalized_advantage_estimate(values, rewards, mask, 1.0, 1.0)
    for a, b in zip(single, exact, strict=True):
        assert a.dtype == torch.float32
        # Sums of 4,096 unit normals are about 64; pairwise summation keeps 1e-6 of that.
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=0)
    values, ones = torch.ones(1, 3, dtype=torch.bfloat16), torch.ones(1, 3)
    advantages, _ = generalized_advantage_estimate(values, torch.zeros(1, 3), ones, 1.0, 1.0)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [[-1.0, -1.0, -1.0]]
    empty = torch.zeros(0, 5)
    advantages, returns = generalized_advantage_estimate(empty, empty, empty, 1.0, 1.0)
    assert advantages.shape == returns.shape == (0, 5)


def test_sums_and_whitening_by_hand():
    values = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, 6.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert masked_sum(values, mask).item() == 15.0
    assert masked_sum(values, mask, dim=1).tolist() == [4.0, 11.0]
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, over n - 1 = 2.
    values, mask = torch.tensor([1.0, 2.0, 100.0, 6.0]), torch.tensor([1, 1, 0, 1])
    expected = [-2 / math.sqrt(7), -1 / math.sqrt(7), 0, 3 / math.sqrt(7)]
    assert masked_whiten(values, mask).tolist() == pytest.approx(expected)
    for mask, value in (([0, 0, 0], NAN), ([0, 1, 0], 2.0)):
        whitened = masked_whiten(torch.tensor([1.0, value, 3.0]), torch.tensor(mask))
        assert whitened.tolist() == [0.0, 0.0, 0.0]


def test_whiten_loses_no_digits_to_the_mean():
    """Rewards around 1000.1 with a spread of 0.01: float32 rounds that mean by 2e-5."""
    generator = torch.Generator().manual_seed(0)
    values = 1000.1 + 0.01 * torch.randn(64, generator=generator)
    exact = values.double()
    expected = (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()
    whitened = masked_whiten(values, torch.ones(64))
    torch.testing.assert_close(whitened.double(), expected, atol=1e-6, rtol=0)


SLOPES = {
    "k1": lambda x: 1.0,
    "k2": lambda x: x,
    "k3": lambda x: 1 - math.exp(-x),
    "abs": lambda x: math.copysign(1, x),
}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1, 0.0]),
        ("abs", [0.5, 1.0, 0.0]),
    ],
)
def test_estimators_and_their_pathwise_gradients(estimator, expected):
    logprobs = torch.tensor([-1.0, -3.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -2.0], dtype=torch.float64)
    result = kl_estimate(logprobs, reference, estimator)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))
    result[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([SLOPES[estimator](0.5), 0.0, 0.0])


def test_k3_keeps_its_digits_and_clamps_are_explicit():
    result = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert result.item() == pytest.approx(5e-9, rel=1e-2)
    far = torch.tensor([-60.0, 60.0]), torch.zeros(2)
    assert kl_estimate(*far, "k1").tolist() == [-60.0, 60.0]
    assert kl_estimate(*far, "k1", input_clamp=20.0).tolist() == [-20.0, 20.0]
    assert kl_estimate(*far, "k3", input_clamp=20.0, output_clamp=10.0).tolist() == [10.0, 10.0]


@pytest.mark.parametrize("far", [-89.0, 89.0, -1e30, 1e30, math.inf, -2.0, 0.5])
@pytest.mark.parametrize("estimator", SLOPES)
@pytest.mark.parametrize("clamps", [{"output_clamp": 10.0}, {"input_clamp": 20.0}])
def test_a_clamp_cuts_the_gradient_to_zero_not_to_nan(far, estimator, clamps):
    """exp(89) is beyond float32: its derivative is infinite, and 0 · inf would be NaN."""
    logprobs = torch.tensor([far], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1), estimator, **clamps)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    slope = 0.0 if abs(far) > 20 else SLOPES[estimator](far)
    assert logprobs.grad.item() == pytest.approx(slope)


def test_controllers_by_hand_and_resumed():
    fixed = KLController(0.05)
    fixed.update(100.0, 512)
    assert fixed.value == 0.05
    fixed.load_state_dict(fixed.state_dict())
    with pytest.raises(ConfigError, match="adaptive"):
        fixed.load_state_dict({"coefficient": 0.1})
    controller, value = KLController(0.2, target=6.0, horizon=1000), 0.2
    # 10 % too high, then errors that are limited to 0.2.
    for kl, samples, factor in ((6.6, 256, 1.0256), (600.0, 100, 1.02), (0.0, 100, 0.98)):
        controller.update(kl, samples)
        value *= factor
        assert controller.value == pytest.approx(value)
    resumed = KLController(0.2, target=6.0, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value
    with pytest.raises(ConfigError, match="fixed"):
        resumed.load_state_dict({})
