"""Corrections of rollouts by another policy: by hand, in the loss, and in the PPO step.

1. Weights, rejection and masks are those worked out by hand, and M2PO's those of its definition.
2. Measures of the gap are those worked out by hand.
3. In the loss they depend neither on micro-batches nor on what does not count, at every level.
4. The configuration refuses what cannot be, and a step makes the passes that a correction needs.
"""

import itertools
import math

import pytest
import torch
from loss_checks import check_garbage, check_micro_batches, check_nothing_counts, evaluate, row
from test_ppo_trainer import names, trainer

from aligner.algorithms.ppo.trainer import make_policy_loss
from aligner.config import CorrectionConfig, parse_config
from aligner.errors import ConfigError
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
from aligner.observe.metric_names import check_names
from aligner.observe.metrics import PhaseTimers
from aligner.types import Denominators, TokenOutputs

# Ratios trainer/sampler of two responses; the last token of the second is padding.
RATIOS = torch.tensor([[4.0, 0.5, 1.0], [0.25, 1.0, 64.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
LOG_RATIO = RATIOS.log()


def average_of(mask):
    counts = Denominators(mask.sum().double(), torch.tensor(float(len(mask))).double())
    return BatchAverage(mask, counts)


# 1. By hand -------------------------------------------------------------------------------------


def test_weights_by_hand():
    tokens = importance_weights(LOG_RATIO, MASK, "token")
    torch.testing.assert_close(tokens, torch.where(MASK, RATIOS, 1.0))
    responses = importance_weights(LOG_RATIO, MASK, "sequence")
    torch.testing.assert_close(responses, torch.tensor([[2.0] * 3, [0.25] * 3]).double())


def test_bounds_by_hand():
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    assert within_bounds(weights, (0.5, 2.0), "truncate").tolist() == [0.5, 0.5, 1, 2, 2]
    assert within_bounds(weights, (0.5, 2.0), "mask").tolist() == [0, 0.5, 1, 2, 0]


def test_a_weight_is_never_infinite():
    far = torch.tensor([[500.0, 400.0], [-500.0, -400.0]])
    for level in ("token", "sequence"):
        weights = importance_weights(far, torch.ones(2, 2, dtype=torch.bool), level)
        torch.testing.assert_close(weights[0], torch.full((2,), math.exp(20)))
        torch.testing.assert_close(weights[1], torch.full((2,), math.exp(-20)))


def test_geometric_rejection_by_hand():
    """Geometric means 2^(1/3) = 1.26 and 1/4^(1/2) = 0.5; a response without tokens stays."""
    for bounds, rejected in [
        ((0.4, 1.3), [False, False]),
        ((0.6, 1.3), [False, True]),
        ((0.4, 1.2), [True, False]),
    ]:
        assert geometric_rejection(LOG_RATIO, MASK, bounds).tolist() == rejected
    nothing = torch.zeros_like(MASK)
    assert geometric_rejection(LOG_RATIO, nothing, (2.0, 3.0)).tolist() == [False, False]


def test_second_moment_by_hand():
    """Squares 4, 1, 0 | 4, 0 (in units of ln² 2) with mean 9/5; less the first 4: 5/4; less both:
    1/3; less the 1 as well: 0."""
    unit = math.log(2) ** 2
    for limit, gone in [
        (1.8, []),
        (1.79, [0]),
        (1.24, [0, 3]),
        (0.33, [0, 1, 3]),
        (1e-9, [0, 1, 3]),
    ]:
        left = second_moment_mask(LOG_RATIO, MASK, limit * unit + 1e-12)
        expected = MASK.clone().flatten()
        expected[gone] = False
        assert left.flatten().tolist() == expected.tolist(), limit
    everything = torch.ones(1, 2, dtype=torch.bool)
    assert second_moment_mask(torch.ones(1, 2), everything, 1.0).all()  # at the limit, not above


def test_second_moment_is_the_fewest_tokens_that_do():
    """Against every subset of six tokens."""
    generator = torch.Generator().manual_seed(0)
    for limit in (0.02, 0.1, 0.5, 5.0):
        values = torch.randn(1, 6, generator=generator, dtype=torch.float64)
        left = second_moment_mask(values, torch.ones(1, 6, dtype=torch.bool), limit)
        squares = values.square().flatten()
        fits = [
            kept
            for count in range(7)
            for kept in itertools.combinations(range(6), count)
            if not kept or squares[list(kept)].mean() <= limit
        ]
        assert int(left.sum()) == max(map(len, fits))
        assert not left.any() or squares[left[0]].mean() <= limit


def test_second_moment_of_each_update_alone():
    """Two updates of one response each: one token of the first goes, none of the second."""
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


# 2. Measures ------------------------------------------------------------------------------------


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


def test_the_kls_are_those_of_two_distributions():
    """Of every token of a vocabulary, weighted as the sampler draws it: k1 and k3 are the KL."""
    generator = torch.Generator().manual_seed(1)
    sampler, policy = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(1)
    drawn = sampler.exp()
    found: dict[str, float] = {}
    for token in range(5):
        d = (policy - sampler)[token].reshape(1, 1)
        one = gap_metrics(d, average_of(torch.ones(1, 1, dtype=torch.bool)))
        for name, value in one.items():
            found[name] = found.get(name, 0.0) + drawn[token].item() * value.item()
    forward = (drawn * (sampler - policy)).sum().item()
    reverse = (policy.exp() * (policy - sampler)).sum().item()
    for name, kl in (("kl", forward), ("reverse_kl", reverse)):
        assert found[f"{name}_k1"] == pytest.approx(kl)
        assert found[f"{name}_k3"] == pytest.approx(kl)


def test_what_a_correction_did_by_hand():
    """Weights 4, ½, 1 | ¼, 1 in bounds [0.4, 2]: two of five outside, masked."""
    correction = CorrectionConfig(weights="token", bounds=(0.4, 2.0), outside="mask")
    weights, metrics = correct(correction, LOG_RATIO, average_of(MASK))
    assert weights[MASK].tolist() == pytest.approx([0, 0.5, 1, 0, 1])
    assert metrics["weights_outside"].item() == pytest.approx(2 / 5)
    assert metrics["importance_weight"].item() == pytest.approx(2.5 / 5)
    assert metrics["importance_weight_square"].item() == pytest.approx(2.25 / 5)
    assert effective_sample_size(2.5 / 5, 2.25 / 5) == pytest.approx(2.5**2 / (5 * 2.25))


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
    nothing = correct(CorrectionConfig(), LOG_RATIO, average_of(MASK))
    assert nothing.weights is None
    assert nothing.metrics == {}


def test_effective_sample_size_is_of_an_update():
    """Two updates: weights 1, 1 and 2, 0: sizes 1 and ½, not that of the means."""
    passes = [{"all_mb_metrics": {"importance_weight": [1, 1], "importance_weight_square": [1, 2]}}]
    found = update_metrics(passes)
    assert found["effective_sample_size"] == pytest.approx(0.75)
    assert found["importance_weight"] == 1
    assert "importance_weight_square" not in found


# 3. In the loss ---------------------------------------------------------------------------------

KINDS = {
    "token": {"weights": "token", "bounds": (0.5, 1.2)},
    "icepop": {"weights": "token", "bounds": (0.8, 1.2), "outside": "mask"},
    "sequence": {"weights": "sequence", "bounds": (0.0, 1.5)},
    "geometric": {"geometric_bounds": (0.9, 1.1)},
    "m2po": {"second_moment": 0.04},
    "sampler": {"old_logprobs": "sampler", "geometric_bounds": (0.9, 1.1)},
}


def random_batch(rows=6, length=9, spread=0.3):
    generator = torch.Generator().manual_seed(7)

    def normal():
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    logprobs = normal() * 0.5 - 2
    batch = {
        "advantages": normal(),
        "token_mask": (torch.rand(rows, length, generator=generator) < 0.7).double(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64),
        "prev_logprobs": logprobs + normal() * 0.1,
        "generation_logprobs": logprobs + normal() * spread,
    }
    batch["second_moment_mask"] = second_moment_masks(batch, 0.04, rows).double()
    return logprobs, batch


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_every_correction_must_pass(kind, surrogate, level):
    logprobs, batch = random_batch()
    loss_function = PPOPolicyLoss(
        correction=CorrectionConfig(**KINDS[kind]),
        surrogate=surrogate,
        ratio_level=level,
        needs_entropy=False,
    )
    check_micro_batches(loss_function, logprobs, batch, [1, 2, 4])
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    check_garbage(loss_function, logprobs, batch, masked)
    check_nothing_counts(loss_function, logprobs, batch)
    plain = PPOPolicyLoss(surrogate=surrogate, ratio_level=level, needs_entropy=False)
    assert evaluate(loss_function, logprobs, batch)[0] != evaluate(plain, logprobs, batch)[0]


def test_a_masked_token_stays_in_the_denominator():
    logprobs, batch = hand_batch([1.0, 1.0], [4.0, 1.0])
    correction = CorrectionConfig(weights="token", bounds=(0.5, 2.0), outside="mask")
    loss, gradient, _ = evaluate(
        PPOPolicyLoss(correction=correction, needs_entropy=False), logprobs, batch
    )
    assert loss == pytest.approx(-(0 + 1) / 2)
    torch.testing.assert_close(gradient, row(0.0, -0.5))


def test_the_cap_is_a_correction():
    logprobs, batch = random_batch()
    for level in ("token", "sequence"):
        cap = PPOPolicyLoss(importance_cap=1.2, ratio_level=level, needs_entropy=False)
        section = CorrectionConfig(weights=level, bounds=(0.0, 1.2))
        same = PPOPolicyLoss(correction=section, ratio_level=level, needs_entropy=False)
        assert evaluate(cap, logprobs, batch)[2] == evaluate(same, logprobs, batch)[2]


def test_without_old_logprobs_the_gap_is_of_the_weights_that_are_trained():
    """The first update of a step: its own log-probs, detached, are the trainer's."""
    logprobs, batch = hand_batch([1.0, 1.0], [4.0, 0.5])
    del batch["prev_logprobs"]
    correction = CorrectionConfig(weights="token", bounds=(0.0, 2.0))
    loss, gradient, metrics = evaluate(
        PPOPolicyLoss(correction=correction, needs_entropy=False), logprobs, batch
    )
    assert loss == pytest.approx(-(2 + 0.5) / 2)
    torch.testing.assert_close(gradient, row(-2.0, -0.5) / 2)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))


def test_the_samplers_log_probs_as_the_old_policys():
    """Ratio 4 of the sampler: clipped at 1.2, and the gap is that of the policy now."""
    logprobs, batch = hand_batch([1.0, 1.0], [4.0, 1.0])
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    correction = CorrectionConfig(old_logprobs="sampler")
    loss, gradient, metrics = evaluate(
        PPOPolicyLoss(correction=correction, needs_entropy=False), logprobs, batch
    )
    assert loss == pytest.approx(-(1.2 + 1) / 2)
    torch.testing.assert_close(gradient, row(0.0, -0.5))
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))


def hand_batch(ratios, gaps):
    """One response: ratios of the loss; ratios of the trainer over the sampler; advantages 1."""
    logprobs = row(*(math.log(ratio) - 1 for ratio in ratios))
    batch = {
        "advantages": torch.ones_like(logprobs),
        "token_mask": torch.ones_like(logprobs),
        "sample_mask": torch.ones(1, dtype=torch.float64),
        "prev_logprobs": torch.full_like(logprobs, -1.0),
        "generation_logprobs": row(*(-1 - math.log(gap) for gap in gaps)),
    }
    return logprobs, batch


def test_the_gradient_is_the_samplers_expectation_made_the_trainers():
    """A bandit of five actions: averaged over the sampler's draws, the weighted gradient is the
    policy gradient on the trainer's own draws; unweighted it is not."""
    generator = torch.Generator().manual_seed(2)
    policy = torch.randn(5, generator=generator, dtype=torch.float64)
    sampler = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    reward = torch.arange(5.0, dtype=torch.float64)
    leaf = policy.clone().requires_grad_()
    (leaf.softmax(0) * reward).sum().backward()
    wanted = -leaf.grad
    for correction, is_unbiased in [
        (CorrectionConfig(), False),
        (CorrectionConfig(weights="token", bounds=(0.0, 100.0)), True),
        (CorrectionConfig(weights="sequence", bounds=(0.0, 100.0)), True),
    ]:
        loss_function = PPOPolicyLoss(correction=correction, needs_entropy=False)
        leaf = policy.clone().requires_grad_()
        for action in range(5):
            batch = {
                "advantages": reward[action].reshape(1, 1),
                "token_mask": row(1.0),
                "sample_mask": torch.ones(1, dtype=torch.float64),
                "generation_logprobs": sampler[action].reshape(1, 1),
            }
            counts = Denominators(torch.tensor(1.0), torch.tensor(1.0))
            logprob = leaf.log_softmax(0)[action].reshape(1, 1)
            loss, _ = loss_function(TokenOutputs(logprob), batch, counts)
            (sampler[action].exp() * loss).backward()
        assert torch.allclose(leaf.grad, wanted) is is_unbiased


# 4. Configuration and step ------------------------------------------------------------------------


def configured(**ppo):
    return parse_config(
        {
            "model": {"restore_from_path": "m.nemo", "ppo": ppo},
            "reward": {"function": "a:b"},
            "data": {"train": {"source": "x.jsonl"}},
        }
    )


def test_the_section_reaches_the_loss():
    config = configured(correction={"weights": "token", "bounds": [0.5, 5], "outside": "mask"})
    assert make_policy_loss(config).correction == CorrectionConfig("token", (0.5, 5.0), "mask")
    assert config.model.ppo.correction.is_on
    assert not configured().model.ppo.correction.is_on


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"correction": {"weights": "tokens"}}, r"correction.weights: must be one of none, token"),
        ({"correction": {"weight": "token"}}, r"correction.weight.*did you mean.*weights"),
        ({"correction": {"weights": "token", "bounds": [2, 0.5]}}, r"bounds=\[2,0.5\].*low <= 1"),
        ({"correction": {"weights": "token", "bounds": [-1, 2]}}, r"correction.bounds.*at least 0"),
        ({"correction": {"weights": "token", "bounds": [0.5, 0.9]}}, r"must lie between them"),
        ({"correction": {"geometric_bounds": [1.1, 2]}}, r"geometric_bounds=\[1.1,2\]"),
        ({"correction": {"bounds": [0.5, 5]}}, r"bounds=\[0.5,5\] is of the weights"),
        ({"correction": {"outside": "mask"}}, r"outside=mask is of the weights"),
        ({"correction": {"second_moment": 0}}, r"second_moment.*greater than 0"),
        (
            {"correction": {"weights": "token"}, "truncated_importance_sampling": 2},
            r"truncated_importance_sampling=2 is model.ppo.correction.weights=token.*leave one",
        ),
        (
            {"correction": {"weights": "token"}, "ratio_level": "sequence"},
            r"weights=token with model.ppo.ratio_level=sequence.*set .*weights=sequence",
        ),
        (
            {"correction": {"weights": "token", "old_logprobs": "sampler"}},
            r"old_logprobs=sampler.*nothing is left for model.ppo.correction.weights=token",
        ),
        (
            {"correction": {"old_logprobs": "sampler"}, "truncated_importance_sampling": 2},
            r"nothing is left for model.ppo.truncated_importance_sampling=2",
        ),
        (
            {"correction": {"old_logprobs": "sampler", "second_moment": 0.04}},
            r"second_moment=0.04 compares.*set model.ppo.correction.old_logprobs=trainer",
        ),
    ],
)
def test_refusals(ppo, message):
    with pytest.raises(ConfigError, match=message):
        configured(**ppo)


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


def test_the_second_moment_needs_all_log_probs_before_training():
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


def test_other_corrections_cost_no_pass():
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
    logprobs = batch["prev_logprobs"]
    groups = ("sampler", "train_optim")
    for kind in KINDS.values():
        loss = PPOPolicyLoss(correction=CorrectionConfig(**kind), needs_entropy=False)
        _, _, metrics = evaluate(loss, logprobs, batch)
        found = update_metrics([{"all_mb_metrics": {key: [v] for key, v in metrics.items()}}])
        for name in found:
            assert any(_is_known(f"{group}/{name}") for group in groups), name


def _is_known(name):
    try:
        check_names([name])
    except ConfigError:
        return False
    return True
