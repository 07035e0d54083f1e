"""Negative log-likelihood: by hand, and what every loss must pass."""

import math

import pytest
import torch
from loss_checks import check_garbage, check_micro_batches, check_nothing_counts, column, evaluate

from aligner.losses.language import NegativeLogLikelihoodLoss

LOSS = NegativeLogLikelihoodLoss()


def batch_of(token_mask, sample_mask):
    return {
        "token_mask": torch.tensor(token_mask, dtype=torch.float64),
        "sample_mask": column(*sample_mask),
    }


def test_by_hand():
    """Three tokens of two rows count: (1 + 2 + 6) / 3, each with slope -1/3."""
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-6.0, -9.0, -9.0]], dtype=torch.float64)
    batch = batch_of([[0, 1, 1], [1, 0, 0]], [1, 1])
    loss, gradient, metrics = evaluate(LOSS, logprobs, batch)
    assert loss == pytest.approx(3.0)
    torch.testing.assert_close(gradient, -batch["token_mask"] / 3)
    expected = (math.exp(-1) + math.exp(-2) + math.exp(-6)) / 3
    assert metrics["token_probability"] == pytest.approx(expected)


def test_what_every_loss_must_pass():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(5, 4, generator=generator, dtype=torch.float64)
    rows = [[0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]]
    batch = batch_of(rows, [1, 1, 0, 1, 1])
    check_micro_batches(LOSS, logprobs, batch, [1, 2, 3])
    masked = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) == 0
    check_garbage(LOSS, logprobs, batch, masked)
    check_nothing_counts(LOSS, logprobs, batch)
