"""Losses of policies and values, by hand."""

import math

import pytest
import torch
from loss_checks import check_by_hand, evaluate, grid, hand_batch, row

from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss


def test_hand_worked():
    """Clip range [0.8, 1.3], dual clip 3; five tokens, one for each way a clip can act.

    ratio 2, A 1: -min(2, 1.3) = -1.3, clipped;  ratio 2, A -1: max(2, 1.3) = 2, free;
    ratio .5, A 1: -.5, free;                    ratio .5, A -1: max(.5, .8) = .8, clipped;
    ratio 10, A -1: stops at 3. Then the importance weight 2 multiplies each.
    """
    ratios = [2.0, 2.0, 0.5, 0.5, 10.0]
    batch = hand_batch(ratios, [1.0, -1.0, 1.0, -1.0, -1.0], gaps=[2.0] * 5)
    loss_function = PPOPolicyLoss(0.2, 0.3, dual_clip=3.0, importance_cap=4.0, needs_entropy=False)
    # d(-A·ρ)/dlogprob = -A·ρ on free tokens, 0 on clipped ones.
    loss, slopes = 2 * (-1.3 + 2 - 0.5 + 0.8 + 3) / 5, 2 * row(0.0, 2.0, -0.5, 0.0, 0.0) / 5
    metrics = check_by_hand(loss_function, batch, loss, slopes)
    assert (metrics["clip_fraction"], metrics["dual_clip_fraction"]) == (0.4, pytest.approx(0.2))
    assert metrics["ppo_ratio"] == pytest.approx(3)
    assert metrics["ppo_ratio_clamped"] == pytest.approx((3 * 1.3 + 2 * 0.8) / 5)
    assert metrics["ppo_ratio_max"] == pytest.approx(10)
    k3 = sum(r - 1 - math.log(r) for r in ratios) / 5
    assert metrics["approx_kl"] == pytest.approx(k3)
    loss, _, metrics = evaluate(PPOPolicyLoss(), *hand_batch([1.0, 1.0], [0.0, 0.0]), row(1.0, 2.0))
    assert (loss, metrics["entropy"]) == (0.0, 1.5)  # a metric without a bonus


@pytest.mark.parametrize(
    ("level", "cap", "weights"),
    [
        ("token", 2.0, [2.0, 0.5]),  # prev/generation = 4 is cut at 2, 0.5 stays
        ("sequence", 3.0, [2.0, 2.0]),  # 4 · 0.5 = 2 for both tokens
    ],
)
def test_importance_weight_by_hand(level, cap, weights):
    """The weight carries no gradient."""
    batch = hand_batch([1.0, 1.0], [1.0, 1.0], gaps=[4.0, 0.5])
    loss_function = PPOPolicyLoss(importance_cap=cap, ratio_level=level, needs_entropy=False)
    metrics = check_by_hand(loss_function, batch, -sum(weights) / 2, -row(*weights) / 2)
    assert metrics["importance_weight"] == pytest.approx(sum(weights) / 2)


def _two_rows():
    """Ratios by token: row 0 is 4 and 1 (geometric mean 2), row 1 is ½ and a masked token."""
    logprobs = grid([4.0, 1.0], [0.5, 1e9]).log() - 1
    batch = {
        "advantages": grid([1.0, 1.0], [-3.0, 0.0]),
        "token_mask": grid([1.0, 1.0], [1.0, 0.0]),
        "sample_mask": torch.ones(2, dtype=torch.float64),
        "prev_logprobs": torch.full((2, 2), -1.0, dtype=torch.float64),
    }
    return logprobs, batch


def test_sequence_ratio_by_hand():
    """GSPO: row 0 has ratio 2 on both tokens, row 1 ratio ½.

    loss = (mean(-2, -2) + 3·½) / 2 sequences. Row 0's ratio moves by 2·½ with each log-prob, and
    both tokens feel it: -(1/2)·2·(2·½)/2 = -½ each; row 1: 3·½ / 2.
    """
    loss_function = PPOPolicyLoss(
        0.9, 9.0, ratio_level="sequence", aggregation="sequence_mean", needs_entropy=False
    )
    slopes = grid([-0.5, -0.5], [0.75, 0.0])
    metrics = check_by_hand(loss_function, _two_rows(), (-2 + 1.5) / 2, slopes)
    assert metrics["ppo_ratio"] == pytest.approx((2 + 2 + 0.5) / 3)
    assert metrics["ppo_ratio_max"] == pytest.approx(2)


def test_sequence_ratio_is_clipped_as_a_row_and_feels_all_advantages():
    """Upper bound 1.5: row 0 (ratio 2, A > 0) stops, though its second token's own ratio is 1."""
    loss_function = PPOPolicyLoss(0.9, 0.5, ratio_level="sequence", needs_entropy=False)
    slopes = grid([0.0, 0.0], [0.5, 0.0])
    metrics = check_by_hand(loss_function, _two_rows(), (-1.5 - 1.5 + 1.5) / 3, slopes)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    # Advantages 1 and 5: the row's ratio feels their mean, each token alike (verl's would not).
    logprobs, batch = _two_rows()
    batch["advantages"] = grid([1.0, 5.0], [0.0, 0.0])
    loss_function = PPOPolicyLoss(0.9, 9.0, ratio_level="sequence", needs_entropy=False)
    _, gradient, _ = evaluate(loss_function, logprobs, batch)
    # -(1 + 5) · d(ratio)/d(logprob) / 3 tokens, d(ratio)/d(logprob) = 2·½
    torch.testing.assert_close(gradient, grid([-2.0, -2.0], [0.0, 0.0]))


def test_cispo_by_hand():
    """Weights clip(4), 1, clip(½) to [0.8, 1.2]; -w·A·logprob, and the slope is -w·A / 3 tokens."""
    lp = [math.log(4) - 1, -1.0, math.log(0.5) - 1]
    loss = (-1.2 * lp[0] - 1.0 * lp[1] + 0.8 * 3 * lp[2]) / 3
    loss_function = PPOPolicyLoss(surrogate="cispo", needs_entropy=False)
    slopes = grid([-1.2, -1.0], [2.4, 0.0]) / 3
    metrics = check_by_hand(loss_function, _two_rows(), loss, slopes)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["ppo_ratio_clamped"] == pytest.approx((1.2 + 1 + 0.8) / 3)
    unbounded = PPOPolicyLoss(1.0, 0.2, surrogate="cispo", needs_entropy=False)
    _, gradient, _ = evaluate(unbounded, *_two_rows())
    torch.testing.assert_close(gradient, grid([-1.2, -1.0], [1.5, 0.0]) / 3)


@pytest.mark.parametrize(
    ("aggregation", "length", "weights"),
    [
        ("token_mean", None, [1 / 3, 1 / 3]),
        ("sequence_mean", None, [1 / 4, 1 / 2]),
        ("fixed_length", 10, [1 / 20, 1 / 20]),
    ],
)
def test_aggregation_by_hand(aggregation, length, weights):
    """What a token of the two-token row and of the one-token row weighs, in every term.

    The importance weight 2 multiplies the surrogate alone.
    """
    logprobs, batch = _two_rows()
    batch["generation_logprobs"] = batch["prev_logprobs"] - math.log(2)
    batch["ref_logprobs"] = logprobs - 0.5
    kl, kl_slope = math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)
    entropy = grid([0.1, 0.2], [0.4, 9.0])
    options = {"aggregation": aggregation, "max_response_length": length, "importance_cap": 4.0}
    loss_function = PPOPolicyLoss(0.9, 9.0, entropy_bonus=0.01, kl_coefficient=0.1, **options)
    long, short = weights
    loss = long * (-8 - 2 - 0.01 * 0.3 + 0.1 * 2 * kl) + short * (3 - 0.01 * 0.4 + 0.1 * kl)
    surrogates = grid([-8 * long, -2 * long], [3 * short, 0.0])
    slopes = surrogates + 0.1 * kl_slope * grid([long, long], [short, 0.0])
    metrics = check_by_hand(loss_function, (logprobs, batch, entropy), loss, slopes)
    # Metrics stay means over tokens.
    assert metrics["entropy"] == pytest.approx(0.7 / 3)
    assert metrics["kl_loss"] == pytest.approx(kl)
    assert metrics["ppo_ratio"] == pytest.approx(5.5 / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip: must be greater than 1, got 1.0"),
        ({"ratio_eps_low": 1.0}, "ratio_eps_low=1.0"),
        ({"entropy_bonus": 0.1, "needs_entropy": False}, "needs the entropy"),
        ({"surrogate": "sapo"}, "surrogate: must be one of clip, cispo, got 'sapo'"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 bounds the clipped surrogate"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PPOPolicyLoss(**options)


def test_value_loss_by_hand():
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
    loss, slopes = 0.5 * (3.24 + 1 + 0.81) / 3, row(0.0, 1.0, -0.9) / 3
    metrics = check_by_hand(PPOValueLoss(0.2), (row(1.0, 1.0, 0.1), batch), loss, slopes)
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
    logprobs, mask = grid([-9.0, -1.0, -2.0], [-6.0, -9.0, -9.0]), grid([0, 1, 1], [1, 0, 0])
    batch = {"token_mask": mask, "sample_mask": torch.ones(2, dtype=torch.float64)}
    metrics = check_by_hand(NegativeLogLikelihoodLoss(), (logprobs, batch), 3.0, -mask / 3)
    expected = (math.exp(-1) + math.exp(-2) + math.exp(-6)) / 3
    assert metrics["token_probability"] == pytest.approx(expected)
