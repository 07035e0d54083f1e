"""Distillation: each divergence by hand."""

import math

import pytest
import torch
from loss_checks import check_by_hand, column, grid, row

from aligner.losses.distillation import LOG_OUTSIDE, DistillationLoss


def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def hand_batch():
    """Two of three tokens matter, of which the teacher says 3/4 and 1/4; the student 1/2, 1/4 and
    1/4 for the third. Token 0 has no predecessor.
    """
    student = torch.stack([log(1.0, 1.0), log(0.5, 0.25)])[None]
    batch = {
        "teacher_topk_logits": torch.stack([log(1.0, 1.0), log(3.0, 1.0)])[None],
        "token_mask": row(0.0, 1.0),
        "sample_mask": column(1.0),
    }
    entropy = row(0.0, 1.5 * math.log(2))  # 1/2·ln 2 + 2·1/4·ln 4
    return student, batch, entropy


def check(loss_function, loss, slopes):
    """``slopes``: of the loss in the student's two log-probs, its entropy held."""
    metrics = check_by_hand(loss_function, hand_batch(), loss, grid([[0.0, 0.0], slopes]))
    assert metrics["topk_probability"] == pytest.approx(0.75)
    assert ("backward_kl" in metrics) == (loss_function.kl != "forward")


FORWARD = 0.75 * math.log(1.5) + 0.25 * math.log(1)
# Inside: 1/2 ln(1/2 · 4/3) + 1/4 ln(1/4 · 4). Outside 1/4 has probability: 1/4 (ln 1/4 + 100).
BACKWARD = 0.5 * math.log(2 / 3) + 0.25 * (math.log(0.25) - LOG_OUTSIDE)


def test_divergences_by_hand():
    forward = [-0.75, -0.25]
    backward = [0.5 * (LOG_OUTSIDE - math.log(0.75)), 0.25 * (LOG_OUTSIDE - math.log(0.25))]
    check(DistillationLoss("forward"), FORWARD, forward)
    check(DistillationLoss("backward"), BACKWARD, backward)
    mixed = [0.2 * one + 0.8 * other for one, other in zip(forward, backward, strict=True)]
    check(DistillationLoss("mixed", 0.2), 0.2 * FORWARD + 0.8 * BACKWARD, mixed)
    # Renormalised: 2/3 and 1/3 of the two tokens. Forward slopes: the student's less the teacher's.
    # Backward, with the divergence D itself: p (log p - log q - D).
    expected = 0.75 * math.log(9 / 8) + 0.25 * math.log(3 / 4)
    loss_function = DistillationLoss("forward", zero_outside_topk=False)
    check(loss_function, expected, [2 / 3 - 3 / 4, 1 / 3 - 1 / 4])
    expected = 2 / 3 * math.log(8 / 9) + 1 / 3 * math.log(4 / 3)
    slopes = [2 / 3 * (math.log(8 / 9) - expected), 1 / 3 * (math.log(4 / 3) - expected)]
    check(DistillationLoss("backward", zero_outside_topk=False), expected, slopes)
