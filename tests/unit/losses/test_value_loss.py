"""Clipped value loss: by hand, against a plain Python loop, and its invariances."""

import statistics

import pytest
import torch
from loss_checks import (
    check_garbage,
    check_micro_batches,
    check_nothing_counts,
    denominators,
    evaluate,
    row,
)

from aligner.errors import ConfigError
from aligner.losses.value import PPOValueLoss
from aligner.types import TokenOutputs


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


def test_without_clipping_the_rollout_values_are_not_needed():
    batch = {"returns": row(3.0), "token_mask": row(1.0), "sample_mask": torch.ones(1)}
    assert evaluate(PPOValueLoss(None), row(1.0), batch)[0] == 2.0


def random_batch():
    generator = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(6, 9, generator=generator, dtype=torch.float64)

    values = normal()
    batch = {
        "values": values + 0.3 * normal(),
        "returns": values + normal(),
        "token_mask": (torch.rand(6, 9, generator=generator) < 0.6).double(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64),
    }
    batch["token_mask"][3] = 0
    masked = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) == 0
    return values, batch, masked


def test_against_a_loop():
    values, batch, masked = random_batch()
    columns = (x[~masked].tolist() for x in (values, batch["values"], batch["returns"]))
    terms = []
    for v, before, r in zip(*columns, strict=True):
        near = before + min(max(v - before, -0.2), 0.2)
        terms.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    assert evaluate(PPOValueLoss(0.2), values, batch)[0] == pytest.approx(statistics.fmean(terms))


def test_what_every_loss_must_pass():
    values, batch, masked = random_batch()
    loss_function = PPOValueLoss(0.2)
    check_micro_batches(loss_function, values, batch, [1, 2, 4])
    check_garbage(loss_function, values, batch, masked)
    check_nothing_counts(loss_function, values, batch)

    def loss(leaf):
        return loss_function(TokenOutputs(leaf), batch, denominators(batch))[0]

    assert torch.autograd.gradcheck(loss, (values.requires_grad_(),))


def test_bad_clip_is_refused():
    with pytest.raises(ConfigError, match="value_clip: must be greater than 0, got 0"):
        PPOValueLoss(0)
