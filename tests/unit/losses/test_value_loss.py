"""Clipped value loss and negative log-likelihood: by hand."""

import math

import pytest
import torch
from loss_checks import evaluate, row

from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.value import PPOValueLoss


def test_hand_worked():
    """Clip 0.2, rollout value 0.

    V 1,  R 2: free (1-2)²=1,      near .2: (.2-2)²=3.24, the larger, no gradient;
    V 1,  R 0: free 1,             near .2: .04 -> free, gradient 2·½·(1-0);
    V .1, R 1: within the range: both .81, gradient .1-1.
    """
    batch = {
        "values": row(0.0, 0.0, 0.0),
        "returns": row(2.0, 0.0, 1.0),
        "token_mask": row(1.0, 1.0, 1.0),
        "sample_mask": torch.ones(1),
    }
    loss, gradient, metrics = evaluate(PPOValueLoss(0.2), row(1.0, 1.0, 0.1), batch)
    assert loss == pytest.approx(0.5 * (3.24 + 1 + 0.81) / 3)
    torch.testing.assert_close(gradient, row(0.0, 1.0, -0.9) / 3)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)


def test_rounding_clips_nothing():
    """Within the range the clipped value is the value itself, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    before, predicted, returns = torch.rand(3, 1, 5000, generator=generator) / 5
    ones = torch.ones(1, 5000)
    batch = {"values": before, "returns": returns, "token_mask": ones, "sample_mask": ones[:, 0]}
    assert evaluate(PPOValueLoss(0.2), predicted, batch)[2]["clip_fraction"] == 0
    # Without clipping the rollout's values are not needed.
    batch = {"returns": row(3.0), "token_mask": row(1.0), "sample_mask": torch.ones(1)}
    assert evaluate(PPOValueLoss(None), row(1.0), batch)[0] == 2.0


def test_negative_log_likelihood_by_hand():
    """Three tokens of two rows count: (1 + 2 + 6) / 3, each with slope -1/3."""
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-6.0, -9.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.float64)
    batch = {"token_mask": mask, "sample_mask": torch.ones(2, dtype=torch.float64)}
    loss, gradient, metrics = evaluate(NegativeLogLikelihoodLoss(), logprobs, batch)
    assert loss == pytest.approx(3.0)
    torch.testing.assert_close(gradient, -mask / 3)
    expected = (math.exp(-1) + math.exp(-2) + math.exp(-6)) / 3
    assert metrics["token_probability"] == pytest.approx(expected)
