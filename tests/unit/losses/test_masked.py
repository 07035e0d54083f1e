"""Masked reductions against numbers worked by hand and plain Python."""

import math

import pytest
import torch

from aligner.losses.masked import masked_sum, masked_whiten

NAN = float("nan")


def test_sums_and_whitening_by_hand():
    values = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, 6.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert masked_sum(values, mask).item() == 15.0
    assert masked_sum(values, mask, dim=1).tolist() == [4.0, 11.0]
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, over n - 1 = 2.
    values, mask = torch.tensor([1.0, 2.0, 100.0, 6.0]), torch.tensor([1, 1, 0, 1])
    expected = [-2 / math.sqrt(7), -1 / math.sqrt(7), 0, 3 / math.sqrt(7)]
    assert masked_whiten(values, mask).tolist() == pytest.approx(expected)


def test_whiten_loses_no_digits_to_the_mean():
    """A mean 1e4 times the spread: sums of squares in float32 would lose it."""
    values = torch.tensor([10000.0, 10001.0, 10002.0])
    whitened = masked_whiten(values, torch.ones(3))
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0.0, 1.0]), atol=1e-6, rtol=0)
    # Rewards around 1000.1 with a spread of 0.01: float32 rounds that mean by 2e-5.
    generator = torch.Generator().manual_seed(0)
    values = 1000.1 + 0.01 * torch.randn(64, generator=generator)
    exact = values.double()
    expected = (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()
    whitened = masked_whiten(values, torch.ones(64))
    torch.testing.assert_close(whitened.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]])
def test_whiten_fewer_than_two(mask):
    whitened = masked_whiten(
        torch.tensor([1.0, NAN if not mask[1] else 2.0, 3.0]), torch.tensor(mask)
    )
    assert whitened.tolist() == [0.0, 0.0, 0.0]
