"""Losses of reward models by hand."""

import math

import pytest
import torch
from loss_checks import check_by_hand, column, evaluate, grid, sigmoid

from aligner.errors import ConfigError
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss


def hand_pair():
    """Scores 3 (at column 1) and 1 (at column 2): d = 2. Strength 1.5, on the chosen row."""
    outputs = grid([9.0, 3.0, 9.0], [9.0, 9.0, 1.0])
    batch = {
        "input_lengths": torch.tensor([2, 3]),
        "sample_mask": column(1, 1),
        "preference_strengths": column(1.5, 7.0),
    }
    return outputs, batch


@pytest.mark.parametrize(
    ("variant", "loss", "slope"),
    [
        ("plain", math.log1p(math.exp(-2)), -sigmoid(-2)),
        ("margin", math.log1p(math.exp(-0.5)), -sigmoid(-0.5)),
        ("scaled", 1.5 * math.log1p(math.exp(-2)), -1.5 * sigmoid(-2)),
    ],
)
def test_bradley_terry_by_hand(variant, loss, slope):
    """-log σ(2), -log σ(2 - 1.5), -1.5·log σ(2); the slope goes to the last tokens alone."""
    slopes = grid([0, slope, 0], [0, 0, -slope])
    metrics = check_by_hand(BradleyTerryLoss(variant), hand_pair(), loss, slopes)
    assert metrics["rewards_chosen"] == 3
    assert metrics["rewards_rejected"] == 1
    assert metrics["rewards_margin"] == 2
    assert metrics["accuracy"] == 1


def test_variants_and_their_strengths():
    outputs, batch = hand_pair()
    del batch["preference_strengths"]
    loss, _, _ = evaluate(BradleyTerryLoss(), outputs, batch)
    assert loss == pytest.approx(math.log1p(math.exp(-2)))
    # Columns swapped: with -s·log σ(d) the loss would fall for ever as d does.
    outputs, batch = hand_pair()
    batch["preference_strengths"] = -batch["preference_strengths"]
    loss, gradient, _ = evaluate(BradleyTerryLoss("scaled"), outputs, batch)
    assert loss == 0
    assert not gradient.any()
    with pytest.raises(ConfigError, match=r"variant: must be one of plain, margin, .* got 'hinge'"):
        BradleyTerryLoss("hinge")


def test_attribute_regression_by_hand():
    """Row 0: (2-1)² and (5-2)² rated, mean 5. Row 1: (1-3)² rated, the other missing: 4.

    loss = (5 + 4) / 2; slopes 2·error / rated in the row / 2 rows.
    """
    outputs = grid([[2, 5], [9, 9]], [[9, 9], [1, 8]])
    batch = {
        "input_lengths": torch.tensor([1, 2]),
        "sample_mask": column(1, 1),
        "attributes": grid([1.0, 2.0], [3.0, 0.0]),
        "attribute_mask": grid([1.0, 1.0], [1.0, 0.0]),
    }
    slopes = grid([[0.5, 1.5], [0, 0]], [[0, 0], [-2.0, 0.0]])
    metrics = check_by_hand(AttributeRegressionLoss(), (outputs, batch), 4.5, slopes)
    assert metrics["absolute_error"] == pytest.approx((2 + 2) / 2)


def test_ratings_may_be_missing_or_of_one_attribute():
    outputs = grid([[0.0, math.nan]])
    batch = {
        "input_lengths": torch.tensor([1]),
        "sample_mask": column(1),
        "attributes": grid([2.0, math.nan]),
        "attribute_mask": torch.tensor([[1, 0]]),
    }
    loss, gradient, _ = evaluate(AttributeRegressionLoss(), outputs, batch)
    assert loss == 4.0
    assert gradient.flatten().tolist() == [-4.0, 0.0]
    batch = {key: batch[key][:, :1] if batch[key].ndim == 2 else batch[key] for key in batch}
    assert evaluate(AttributeRegressionLoss(), grid([5.0, 1.0]), batch)[0] == 9.0
