"""What every loss must pass: micro-batches, masked garbage, and a batch in which nothing counts."""

import math
from dataclasses import replace

import pytest
import torch
from loss_checks import CHOICES, LENGTH, ROWS, column, denominators, evaluate, random_batch

from aligner.config import CorrectionConfig
from aligner.errors import DataError
from aligner.losses.distillation import DistillationLoss
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.losses.value import PPOValueLoss
from aligner.observe.diagnostics import update_metrics
from aligner.observe.metrics import describe
from aligner.types import TokenOutputs

CORRECTIONS = [
    CorrectionConfig(weights="token", bounds=(0.5, 1.2)),
    CorrectionConfig(weights="token", bounds=(0.8, 1.2), outside="mask"),
    CorrectionConfig(weights="sequence", bounds=(0.0, 1.5)),
    CorrectionConfig(geometric_bounds=(0.9, 1.1)),
    CorrectionConfig(second_moment=0.04),
    CorrectionConfig(old_logprobs="sampler", geometric_bounds=(0.9, 1.1)),
]
COMMON = {"entropy_bonus": 0.01, "kl_coefficient": 0.1, "importance_cap": 1.1}
POLICY = [
    PPOPolicyLoss(0.1, 0.25, dual_clip=1.5, **COMMON),
    PPOPolicyLoss(ratio_level="sequence", aggregation="sequence_mean", **COMMON),
    PPOPolicyLoss(surrogate="cispo", aggregation="fixed_length", max_response_length=9, **COMMON),
    PPOPolicyLoss(surrogate="cispo", ratio_level="sequence", **COMMON),
    PPOPolicyLoss(aggregation="sequence_mean", dual_clip=1.5, **COMMON),
    *(
        PPOPolicyLoss(correction=each, surrogate=surrogate, ratio_level=level, needs_entropy=False)
        for each in CORRECTIONS
        for surrogate in ("clip", "cispo")
        for level in ("token", "sequence")
    ),
]
PAIRS = [
    *(DPOLoss(sft_weight=0.3), DPOLoss(label_smoothing=0.2, average_logprobs=True), IPOLoss()),
    *(RPOLoss(distance=distance) for distance in ("square", "forward_kl", "backward_kl")),
    SimPOLoss(sft_weight=0.3),
]
DISTILLATION = [
    DistillationLoss(kl, mixed_weight=0.3, zero_outside_topk=zero)
    for kl in ("forward", "backward", "mixed")
    for zero in (True, False)
]
SCORES = [*map(BradleyTerryLoss, ("plain", "margin", "scaled")), AttributeRegressionLoss()]
TOKENS = [PPOValueLoss(0.2), NegativeLogLikelihoodLoss(), KTOLoss()]
OF_SAMPLES = ("ground_truth_rewards", "kl_baseline", "preference_strengths", "attributes")


def case_of(loss_function):
    """Outputs, entropies, batch, and where outputs do not count by the masks of the batch."""
    outputs, entropy, batch = random_batch()
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, LENGTH, 9, generator=generator, dtype=torch.float64)
    if loss_function in SCORES:  # the score is the output at the last token
        last = torch.arange(LENGTH) == batch["input_lengths"][:, None] - 1
        masked = ~last | (batch["sample_mask"] == 0)[:, None]
    if loss_function in DISTILLATION:
        logprobs = logits.log_softmax(-1)
        outputs, entropy = logprobs[..., :CHOICES], -(logprobs.exp() * logprobs).sum(-1)
    elif isinstance(loss_function, AttributeRegressionLoss):
        outputs = logits[..., :CHOICES]
    if outputs.ndim == 3:
        masked = masked[..., None].expand_as(outputs)
    return outputs, entropy, batch, masked


@pytest.mark.parametrize("loss", [*POLICY, *PAIRS, *DISTILLATION, *SCORES, *TOKENS], ids=str)
def test_what_every_loss_must_pass(loss):
    outputs, entropy, batch, masked = case_of(loss)
    value, gradient, metrics = evaluate(loss, outputs, batch, entropy)
    assert value != 0
    if loss in POLICY and loss.correction.is_on:
        for name in update_metrics([{"all_mb_metrics": {k: [v] for k, v in metrics.items()}}]):
            assert describe(f"sampler/{name}") or describe(f"train_optim/{name}"), name
        assert evaluate(replace(loss, correction=CorrectionConfig()), outputs, batch)[0] != value
    # Loss, gradient and metrics do not depend on how rows are cut into micro-batches.
    for size in [2, 4, 6] if loss in PAIRS + SCORES[:3] else [1, 3, 4]:
        leaf, parts = outputs.clone().requires_grad_(), {}
        for start in range(0, ROWS, size):
            rows = slice(start, start + size)
            micro = {name: each[rows] for name, each in batch.items()}
            micro_loss, shares = loss(
                TokenOutputs(leaf[rows], entropy[rows]), micro, denominators(batch)
            )
            micro_loss.backward()
            for name, share in shares.items():
                parts.setdefault(name, []).append(share.item())
        torch.testing.assert_close(leaf.grad, gradient)
        totals = {k: max(v) if k.endswith("_max") else sum(v) for k, v in parts.items()}
        assert totals.keys() == metrics.keys()
        for name, total in totals.items():
            torch.testing.assert_close(total, metrics[name], msg=f"{name}, {size} rows")
    # NaN and infinity that are masked reach neither loss, gradient nor metrics.
    out = batch["sample_mask"] == 0
    assert (gradient[masked] == 0).all()
    for garbage in (math.nan, math.inf, -math.inf):
        dirty = dict(batch)
        for name, kept in batch.items():
            if kept.shape == masked.shape and name != "token_mask":
                dirty[name] = torch.where(masked, -garbage, kept)
            elif name in OF_SAMPLES:
                dirty[name] = torch.where(out.view(-1, *[1] * (kept.ndim - 1)), garbage, kept)
        tokens = masked if masked.ndim == entropy.ndim else masked.any(dim=-1)
        spoilt = torch.where(masked, garbage, outputs), torch.where(tokens, garbage, entropy)
        found, slopes, measured = evaluate(loss, spoilt[0], dirty, spoilt[1])
        assert (found, measured) == (value, metrics), garbage
        assert torch.equal(slopes, gradient), garbage
    # A batch without a sample that counts has loss 0 and gradient 0.
    batch["sample_mask"] = torch.zeros(ROWS, dtype=torch.float64)
    value, gradient, metrics = evaluate(loss, outputs, batch, entropy)
    assert value == 0
    assert (gradient == 0).all()
    assert all(each == 0 for each in metrics.values()), metrics


# CISPO holds its weight still, so that its slope is another.
SMOOTH = [*(loss for loss in POLICY[:5] if loss.surrogate != "cispo"), *PAIRS, *TOKENS]


@pytest.mark.parametrize("loss_function", SMOOTH, ids=str)
def test_gradients_are_those_of_finite_differences(loss_function):
    outputs, entropy, batch, _ = case_of(loss_function)

    def loss(*given):
        return loss_function(TokenOutputs(*given), batch, denominators(batch))[0]

    assert torch.autograd.gradcheck(loss, (outputs.requires_grad_(), entropy.requires_grad_()))


def test_a_pair_counts_if_both_rows_do():
    logprobs, _, batch = random_batch()
    batch["sample_mask"] = column(1, 0, 0, 1, 1, 1, 1, 1)
    _, gradient, _ = evaluate(DPOLoss(), logprobs, batch)
    assert (gradient[:4] == 0).all()
    assert all(gradient[row].any() for row in (4, 6, 7))  # row 5 has no token
    with pytest.raises(DataError, match=r"a micro-batch of 3 rows.*to an even number"):
        evaluate(DPOLoss(), logprobs[:3], {name: each[:3] for name, each in batch.items()})
