"""KL estimators and coefficient controllers."""

import math

import pytest
import torch

from aligner.algorithms.ppo.credit import KLController
from aligner.errors import ConfigError
from aligner.losses.policy import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        ("k1", [0.5, -1.0, 0.0], 1.0),
        ("k2", [0.125, 0.5, 0.0], 0.5),
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1, 0.0], 1 - math.exp(-0.5)),
        ("abs", [0.5, 1.0, 0.0], 1.0),
    ],
)
def test_estimators_and_their_pathwise_gradients(estimator, expected, gradient):
    logprobs = torch.tensor([-1.0, -3.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -2.0], dtype=torch.float64)
    result = kl_estimate(logprobs, reference, estimator)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))
    result[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([gradient, 0.0, 0.0])


def test_k3_keeps_its_digits_and_clamps_are_explicit():
    result = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert result.item() == pytest.approx(5e-9, rel=1e-2)
    far = torch.tensor([-60.0, 60.0]), torch.zeros(2)
    assert kl_estimate(*far, "k1").tolist() == [-60.0, 60.0]
    assert kl_estimate(*far, "k1", input_clamp=20.0).tolist() == [-20.0, 20.0]
    assert kl_estimate(*far, "k3", input_clamp=20.0, output_clamp=10.0).tolist() == [10.0, 10.0]


SLOPES = {
    "k1": lambda x: 1.0,
    "k2": lambda x: x,
    "k3": lambda x: 1 - math.exp(-x),
    "abs": lambda x: math.copysign(1, x),
}


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
