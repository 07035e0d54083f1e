"""Losses on pairs, and KTO: by hand."""

import math

import pytest
import torch
from loss_checks import NAN, check_by_hand, column, evaluate, grid, sigmoid

from aligner.errors import ConfigError
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss, kto_kl_baseline


def hand_pair():
    """One pair. Log-ratios: chosen -1 and 3 (sum 2), rejected -1 (its second token is masked).

    The difference of sums is h = 2 - (-1) = 3; of means, 1 - (-1) = 2.
    """
    logprobs = grid([-2.0, -1.0], [-3.0, -9.0])
    batch = {
        "ref_logprobs": grid([-1.0, -4.0], [-2.0, -5.0]),
        "token_mask": grid([1.0, 1.0], [1.0, 0.0]),
        "sample_mask": column(1, 1),
        "ground_truth_rewards": column(1.0, 0.25),
    }
    return logprobs, batch


def slopes(per_chosen_token, per_rejected_token):
    return grid([per_chosen_token] * 2, [per_rejected_token, 0.0])


def slope_pair(slope):
    return slope, -slope


DPO = math.log1p(math.exp(-1.5))
CDPO = 0.9 * DPO + 0.1 * math.log1p(math.exp(1.5))
SLOPE = 0.5 * sigmoid(-1.5)  # of DPO
P, Q = sigmoid(1.5), sigmoid(0.75)
FORWARD = P * math.log(P / Q) + (1 - P) * math.log((1 - P) / (1 - Q))
BACKWARD = Q * math.log(Q / P) + (1 - Q) * math.log((1 - Q) / (1 - P))


@pytest.mark.parametrize(
    ("loss_function", "loss", "chosen", "rejected"),
    [
        # β = ½, m = 1.5: loss -log σ(1.5); slope -β·σ(-1.5) on chosen tokens, + on the rejected.
        (DPOLoss(0.5), DPO, -SLOPE, SLOPE),
        # ε = 0.1: 0.9·softplus(-1.5) + 0.1·softplus(1.5); slope in m: σ(m) - 0.9.
        (DPOLoss(0.5, label_smoothing=0.1), CDPO, *slope_pair(0.5 * (sigmoid(1.5) - 0.9))),
        # h = 3, 1/(2β) = 1: (3 - 1)², slope 2·2. Averaged: h = 2, loss 1, slope 2 / length.
        (IPOLoss(beta=0.5), 4.0, 4.0, -4.0),
        (IPOLoss(beta=0.5, average_logprobs=True), 1.0, 1.0, -2.0),
        # g = 2·0.75 = 1.5 and m = 1.5 with β = ½: no loss. β = 1: (3 - 1.5)², slope 2·1.5·β.
        (RPOLoss(0.5, distance="square", reward_scale=2.0), 0.0, 0.0, 0.0),
        (RPOLoss(1.0, distance="square", reward_scale=2.0), 2.25, 3.0, -3.0),
        # p = σ(m), m = 1.5; q = σ(g), g = 0.75. Slope in m: of KL(p‖q) p(1-p)·(m - g), of KL(q‖p)
        # p - q.
        (RPOLoss(0.5, distance="forward_kl"), FORWARD, *slope_pair(0.5 * P * (1 - P) * 0.75)),
        (RPOLoss(0.5, distance="backward_kl"), BACKWARD, *slope_pair(0.5 * (P - Q))),
        # The chosen response's mean log-prob is -1.5; the term's slope is -weight / length.
        (DPOLoss(beta=0.5, sft_weight=0.2), DPO + 0.2 * 1.5, -SLOPE - 0.1, SLOPE),
    ],
    ids=str,
)
def test_losses_by_hand(loss_function, loss, chosen, rejected):
    metrics = check_by_hand(loss_function, hand_pair(), loss, slopes(chosen, rejected))
    assert ("sft_loss" in metrics) == (loss_function.sft_weight > 0)
    if loss_function.sft_weight > 0:
        expected = {"sft_loss": 1.5, "preference_loss": DPO, "accuracy": 1.0}
        expected |= {"rewards_chosen": 1.0, "rewards_rejected": -0.5, "rewards_margin": 1.5}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_simpo_by_hand():
    """Means -1.5 and -3, β = 2: m = 3, γ = 1: -log σ(2); slope β·σ(-2) / length. No reference."""
    logprobs, batch = hand_pair()
    del batch["ref_logprobs"]
    loss, slope = math.log1p(math.exp(-2)), 2 * sigmoid(-2)
    loss_function, gradient = SimPOLoss(beta=2.0, target_margin=1.0), slopes(-slope / 2, slope)
    metrics = check_by_hand(loss_function, (logprobs, batch), loss, gradient)
    assert metrics["rewards_margin"] == pytest.approx(3.0)


@pytest.mark.parametrize("loss", [DPOLoss(), KTOLoss()])
def test_rounding_is_a_tie(loss):
    """The sign of a log-ratio of a policy to itself depends on how rows were batched."""
    _, batch = hand_pair()
    batch["desirable"], batch["kl_baseline"] = column(1, 0), column(0, 0)
    better = torch.tensor([[1.0], [-1.0]])
    for difference, accuracy in ((1e-6, 0), (1e-3, 1)):
        moved = batch["ref_logprobs"] + difference * better
        assert evaluate(loss, moved, batch)[2]["accuracy"] == accuracy


def test_kto_by_hand():
    """β = ½, z = 1; λ_D = 2. Desirable row: r = 2, gain ½·(2 - 1); other: r = -1, ½·(1 + 1).

    loss = (2·σ(-½) + σ(-1)) / 2; d/dr = -λ·β·σ'(gain) on the desirable row, + on the other.
    """
    logprobs, batch = hand_pair()
    batch["desirable"], batch["kl_baseline"] = column(1, 0), column(1, 1)
    loss, loss_function = (2 * sigmoid(-0.5) + sigmoid(-1)) / 2, KTOLoss(0.5, desirable_weight=2.0)
    good = -2 * 0.5 * sigmoid(0.5) * sigmoid(-0.5) / 2
    bad = 0.5 * sigmoid(1) * sigmoid(-1) / 2
    metrics = check_by_hand(loss_function, (logprobs, batch), loss, slopes(good, bad))
    assert metrics["rewards"] == pytest.approx(0.5 * (2 - 1) / 2)
    assert metrics["rewards_margin"] == pytest.approx((0.5 + 1) / 2)
    assert metrics["accuracy"] == 1.0
    assert metrics["desirable_fraction"] == 0.5
    assert metrics["kl_baseline"] == 1.0


def test_kto_weights_sides_and_baseline():
    """A row on the wrong side of the baseline loses more than half its weight."""
    logprobs, batch = hand_pair()
    batch["desirable"], batch["kl_baseline"] = column(0, 1), column(1, 1)
    loss, _, metrics = evaluate(KTOLoss(0.5, undesirable_weight=3.0), logprobs, batch)
    assert loss == pytest.approx((3 * sigmoid(0.5) + sigmoid(1)) / 2)
    assert metrics["accuracy"] == 0
    # Rows drift by 2 and -1: mean ½. The other way round it is negative, so 0.
    logprobs, batch = hand_pair()
    masks = batch["token_mask"], batch["sample_mask"]
    leaf = logprobs.requires_grad_()
    baseline = kto_kl_baseline(leaf, batch["ref_logprobs"], *masks)
    assert (baseline.item(), baseline.requires_grad) == (0.5, False)
    assert kto_kl_baseline(batch["ref_logprobs"], logprobs, *masks).item() == 0
    logprobs = torch.where(torch.tensor([[False], [True]]), NAN, logprobs)
    assert kto_kl_baseline(logprobs, batch["ref_logprobs"], masks[0], column(1, 0)).item() == 2


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="beta: must be greater than 0, got 0"):
        DPOLoss(beta=0.0)
    with pytest.raises(ConfigError, match="undesirable_weight: must be at least 0, got -1"):
        KTOLoss(undesirable_weight=-1.0)
