"""Corrections in the loss, and in the PPO step."""

import math

import pytest
import torch
from loss_checks import check_loss, evaluate, hand_batch, policy_batch, row
from settings import parsed
from test_ppo_trainer import names, trainer

from aligner.algorithms.ppo.build import make_policy_loss
from aligner.config import CorrectionConfig
from aligner.losses.corrections import second_moment_masks
from aligner.losses.policy import PPOPolicyLoss
from aligner.observe.diagnostics import update_metrics
from aligner.observe.metrics import PhaseTimers, describe

KINDS = {
    "token": {"weights": "token", "bounds": (0.5, 1.2)},
    "icepop": {"weights": "token", "bounds": (0.8, 1.2), "outside": "mask"},
    "sequence": {"weights": "sequence", "bounds": (0.0, 1.5)},
    "geometric": {"geometric_bounds": (0.9, 1.1)},
    "m2po": {"second_moment": 0.04},
    "sampler": {"old_logprobs": "sampler", "geometric_bounds": (0.9, 1.1)},
}


def loss_of(correction):
    return PPOPolicyLoss(correction=correction, needs_entropy=False)


def random_batch():
    logprobs, _, batch = policy_batch(seed=7)
    batch["second_moment_mask"] = second_moment_masks(batch, 0.04, len(logprobs)).double()
    return logprobs, batch


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_every_correction_must_pass(kind, surrogate, level):
    logprobs, batch = random_batch()
    correction = CorrectionConfig(**KINDS[kind])
    loss_function, plain = (
        PPOPolicyLoss(
            correction=section, surrogate=surrogate, ratio_level=level, needs_entropy=False
        )
        for section in (correction, CorrectionConfig())
    )
    check_loss(loss_function, logprobs, batch, [1, 2, 4])
    assert evaluate(loss_function, logprobs, batch)[0] != evaluate(plain, logprobs, batch)[0]


def test_a_masked_token_stays_in_the_denominator():
    logprobs, batch = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 1.0])
    correction = CorrectionConfig(weights="token", bounds=(0.5, 2.0), outside="mask")
    loss, gradient, _ = evaluate(loss_of(correction), logprobs, batch)
    assert loss == pytest.approx(-(0 + 1) / 2)
    torch.testing.assert_close(gradient, row(0.0, -0.5))


def test_old_logprobs_of_the_trainer_and_of_the_sampler():
    """The first update of a step: its own log-probs, detached, are the trainer's."""
    logprobs, batch = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 0.5])
    del batch["prev_logprobs"]
    correction = CorrectionConfig(weights="token", bounds=(0.0, 2.0))
    loss, gradient, metrics = evaluate(loss_of(correction), logprobs, batch)
    assert loss == pytest.approx(-(2 + 0.5) / 2)
    torch.testing.assert_close(gradient, row(-2.0, -0.5) / 2)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))
    # Ratio 4 of the sampler: clipped at 1.2, and the gap is that of the policy now.
    logprobs, batch = hand_batch([1.0, 1.0], [1.0, 1.0], [4.0, 1.0])
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    correction = CorrectionConfig(old_logprobs="sampler")
    loss, gradient, metrics = evaluate(loss_of(correction), logprobs, batch)
    assert loss == pytest.approx(-(1.2 + 1) / 2)
    torch.testing.assert_close(gradient, row(0.0, -0.5))
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
    assert "logprobs" not in names(log)
    assert [entry for entry in log if entry[0] == "train_policy"] == [("train_policy", 2, True)] * 2
    assert (t.policy.trained["prev_logprobs"] == t.policy.trained["generation_logprobs"]).all()
    # The KL in the reward is of the policy that sampled: k1 = -1.25 - -1.5.
    assert metrics["train_rollouts/init_policy_kl"] == pytest.approx(0.25)


def test_corrections_that_cost_a_pass_and_others():
    log = []
    t = trainer(log, ppo={"correction": {"second_moment": 0.04}})
    t.step(1, PhaseTimers())
    assert ("logprobs", 2) in log
    # Every token is off by 0.25, whose square is above the limit: none is left.
    assert t.policy.trained["second_moment_mask"].sum() == 0
    log = []
    t = trainer(log, ppo={"correction": {"second_moment": 0.07}})
    t.step(1, PhaseTimers())
    mask = t.policy.trained["second_moment_mask"]
    assert (mask == t.policy.trained["token_mask"]).all()
    log = []
    ppo = {"correction": {"weights": "token", "geometric_bounds": [0.9, 1.1]}}
    trainer(log, ppo=ppo).step(1, PhaseTimers())
    assert ("logprobs", 1) in log  # the second mini-batch alone, as without
    assert [entry for entry in log if entry[0] == "train_policy"] == [
        ("train_policy", 1, False),
        ("train_policy", 1, True),
    ]


def test_every_metric_is_explained():
    _, batch = random_batch()
    for kind in KINDS.values():
        loss = loss_of(CorrectionConfig(**kind))
        _, _, metrics = evaluate(loss, batch["prev_logprobs"], batch)
        found = update_metrics([{"all_mb_metrics": {key: [v] for key, v in metrics.items()}}])
        for name in found:
            assert describe(f"sampler/{name}") or describe(f"train_optim/{name}"), name
