"""Corrections of rollouts by another policy: by hand, in the loss, and in the PPO step."""

import math

import pytest
import torch
from loss_checks import check_by_hand, hand_batch, row
from settings import parsed
from test_ppo_trainer import names, trainer

from aligner.algorithms.ppo.build import make_policy_loss
from aligner.config import CorrectionConfig
from aligner.losses.corrections import (
    correct,
    effective_sample_size,
    gap_metrics,
    geometric_rejection,
    importance_weights,
    second_moment_mask,
    second_moment_masks,
    within_bounds,
)
from aligner.losses.masked import BatchAverage
from aligner.losses.policy import PPOPolicyLoss
from aligner.observe.diagnostics import update_metrics
from aligner.observe.metrics import PhaseTimers
from aligner.types import Denominators

# Ratios trainer/sampler of two responses; the last token of the second is padding.
RATIOS = torch.tensor([[4.0, 0.5, 1.0], [0.25, 1.0, 64.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
LOG_RATIO = RATIOS.log()


def average_of(mask):
    counts = Denominators(mask.sum().double(), torch.tensor(float(len(mask))).double())
    return BatchAverage(mask, counts)


def test_weights_bounds_and_rejection_by_hand():
    tokens = importance_weights(LOG_RATIO, MASK, "token")
    torch.testing.assert_close(tokens, torch.where(MASK, RATIOS, 1.0))
    responses = importance_weights(LOG_RATIO, MASK, "sequence")
    torch.testing.assert_close(responses, torch.tensor([[2.0] * 3, [0.25] * 3]).double())
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    assert within_bounds(weights, (0.5, 2.0), "truncate").tolist() == [0.5, 0.5, 1, 2, 2]
    assert within_bounds(weights, (0.5, 2.0), "mask").tolist() == [0, 0.5, 1, 2, 0]
    far = torch.tensor([[500.0, 400.0], [-500.0, -400.0]])
    for level in ("token", "sequence"):
        weights = importance_weights(far, torch.ones(2, 2, dtype=torch.bool), level)
        torch.testing.assert_close(weights[0], torch.full((2,), math.exp(20)))
        torch.testing.assert_close(weights[1], torch.full((2,), math.exp(-20)))
    # Geometric means 2^(1/3) = 1.26 and 1/4^(1/2) = 0.5. A response without tokens stays.
    for bounds, rejected in [((0.6, 1.3), [False, True]), ((0.4, 1.2), [True, False])]:
        assert geometric_rejection(LOG_RATIO, MASK, bounds).tolist() == rejected
    nothing = torch.zeros_like(MASK)
    assert geometric_rejection(LOG_RATIO, nothing, (2.0, 3.0)).tolist() == [False, False]


def test_second_moment_by_hand():
    unit = math.log(2) ** 2
    for limit, gone in [(1.8, []), (1.79, [0]), (1.24, [0, 3]), (0.33, [0, 1, 3])]:
        left = second_moment_mask(LOG_RATIO, MASK, limit * unit + 1e-12)
        expected = MASK.clone().flatten()
        expected[gone] = False
        assert left.flatten().tolist() == expected.tolist(), limit
    everything = torch.ones(1, 2, dtype=torch.bool)
    assert second_moment_mask(torch.ones(1, 2), everything, 1.0).all()  # at the limit, not above
    # Two updates of one response each: one token of the first goes, none of the second.
    batch = {
        "prev_logprobs": torch.tensor([[0.0, 1.0, 0.1], [0.0, 0.1, 0.1]]) - 2,
        "generation_logprobs": torch.full((2, 3), -2.0),
        "token_mask": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        "sample_mask": torch.ones(2),
    }
    assert second_moment_masks(batch, 0.04, 1).tolist() == [[0, 0, 1], [0, 1, 1]]
    # Together the mean without the largest is the same, but three tokens share it.
    assert second_moment_masks(batch, 0.3, 2).tolist() == [[0, 1, 1], [0, 1, 1]]
    assert second_moment_masks(batch, 0.3, 1).tolist() == [[0, 0, 1], [0, 1, 1]]
    batch["sample_mask"] = torch.tensor([0.0, 1.0])
    assert second_moment_masks(batch, 0.04, 2).tolist() == [[0, 0, 0], [0, 1, 1]]


def test_measures_of_the_gap_by_hand():
    ratios = [4.0, 0.5, 1.0, 0.25, 1.0]
    found = {name: value.item() for name, value in gap_metrics(LOG_RATIO, average_of(MASK)).items()}

    def mean(function):
        return pytest.approx(sum(map(function, ratios)) / len(ratios))

    assert found == {
        "logprob_gap_mean": mean(lambda r: abs(math.log(r))),
        "logprob_gap_max": pytest.approx(math.log(4)),
        "kl_k1": mean(lambda r: -math.log(r)),
        "kl_k3": mean(lambda r: r - 1 - math.log(r)),
        "reverse_kl_k1": mean(lambda r: r * math.log(r)),
        "reverse_kl_k3": mean(lambda r: r * math.log(r) - r + 1),
        "token_mult_prob_error": mean(lambda r: max(r, 1 / r)),
        "tokens_above_ln2": mean(lambda r: float(abs(math.log(r)) > math.log(2))),
    }


def test_what_a_correction_did_by_hand():
    correction = CorrectionConfig(weights="token", bounds=(0.4, 2.0), outside="mask")
    weights, metrics = correct(correction, LOG_RATIO, average_of(MASK))
    assert weights[MASK].tolist() == pytest.approx([0, 0.5, 1, 0, 1])
    assert metrics["weights_outside"].item() == pytest.approx(2 / 5)
    assert metrics["importance_weight"].item() == pytest.approx(2.5 / 5)
    assert metrics["importance_weight_square"].item() == pytest.approx(2.25 / 5)
    assert effective_sample_size(2.5 / 5, 2.25 / 5) == pytest.approx(2.5**2 / (5 * 2.25))
    # Two updates: weights 1, 1 and 2, 0: sizes 1 and ½, not that of the means.
    passes = [{"all_mb_metrics": {"importance_weight": [1, 1], "importance_weight_square": [1, 2]}}]
    found = update_metrics(passes)
    assert found["effective_sample_size"] == pytest.approx(0.75)
    assert found["importance_weight"] == 1
    assert "importance_weight_square" not in found


def test_parts_of_a_correction_multiply():
    left = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    correction = CorrectionConfig(
        weights="sequence", bounds=(0.0, 1.5), geometric_bounds=(0.6, 2.0), second_moment=0.04
    )
    weights, metrics = correct(correction, LOG_RATIO, average_of(MASK), left)
    assert weights[MASK].tolist() == pytest.approx([1.5, 0, 1.5, 0, 0])
    assert metrics["weights_outside"].item() == pytest.approx(3 / 5)
    assert metrics["tokens_rejected"].item() == pytest.approx(2 / 5)
    assert metrics["tokens_over_second_moment"].item() == pytest.approx(1 / 5)
    assert correct(CorrectionConfig(), LOG_RATIO, average_of(MASK)) == (None, {})


def loss_of(correction):
    return PPOPolicyLoss(correction=correction, needs_entropy=False)


def test_a_masked_token_stays_in_the_denominator():
    case = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 1.0])
    correction = CorrectionConfig(weights="token", bounds=(0.5, 2.0), outside="mask")
    check_by_hand(loss_of(correction), case, -(0 + 1) / 2, row(0.0, -0.5))


def test_old_logprobs_of_the_trainer_and_of_the_sampler():
    """The first update of a step: its own log-probs, detached, are the trainer's."""
    logprobs, batch = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 0.5])
    del batch["prev_logprobs"]
    correction = CorrectionConfig(weights="token", bounds=(0.0, 2.0))
    case = logprobs, batch
    metrics = check_by_hand(loss_of(correction), case, -(2 + 0.5) / 2, row(-2.0, -0.5) / 2)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))
    # Ratio 4 of the sampler: clipped at 1.2, and the gap is that of the policy now.
    logprobs, batch = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 1.0])
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    correction = CorrectionConfig(old_logprobs="sampler")
    case = logprobs, batch
    metrics = check_by_hand(loss_of(correction), case, -(1.2 + 1) / 2, row(0.0, -0.5))
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))


def test_the_section_reaches_the_loss():
    section = {"weights": "token", "bounds": [0.5, 5], "outside": "mask"}
    config = parsed({"model.ppo.correction": section})
    assert make_policy_loss(config).correction == CorrectionConfig("token", (0.5, 5.0), "mask")
    assert config.model.ppo.correction.is_on
    assert not parsed().model.ppo.correction.is_on


def test_the_samplers_log_probs_need_no_pass():
    log = []
    ppo = {"correction": {"old_logprobs": "sampler"}, "ppo_epochs": 2}
    t = trainer(log, loop={"initial_policy_kl_penalty": 0.1}, ppo=ppo)
    metrics = t.step(1, PhaseTimers()).metrics
    assert "policy.get_logprobs" not in names(log)
    assert [data.size for data in t.policy.trained] == [2, 2]
    for data in t.policy.trained:
        assert (data["prev_logprobs"] == data["generation_logprobs"]).all()
    # The KL in the reward is of the policy that sampled: k1 = -1.25 - -1.5.
    assert metrics["train_rollouts/init_policy_kl"] == pytest.approx(0.25)


def test_corrections_that_cost_a_pass_and_others():
    # Every token is off by 0.25: with a limit below the square of that, none is left.
    for limit, share in ((0.04, 0), (0.07, 1)):
        t = trainer(log := [], ppo={"correction": {"second_moment": limit}})
        t.step(1, PhaseTimers())
        assert ("policy.get_logprobs", 2) in log
        data = t.policy.trained[-1]
        assert (data["second_moment_mask"] == share * data["token_mask"]).all()
