"""Our formulas against verl's. Run by `benchmarks.formulas`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.config import CorrectionConfig
from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.corrections import (
    correct,
    effective_sample_size,
    gap_metrics,
    geometric_rejection,
)
from aligner.losses.groups import CriticFreeEstimator, token_advantages
from aligner.losses.masked import BatchAverage, masked_whiten
from aligner.losses.policy import PPOPolicyLoss, kl_estimate
from aligner.losses.value import PPOValueLoss
from aligner.types import Denominators
from benchmarks.formulas_cases import Comparisons, Inputs, main

FULL_WIDTH = 17  # verl's fixed length by default


def compare(table: Comparisons) -> None:
    inputs = Inputs()
    policy_losses(table, inputs)
    values_and_kl(table, inputs)
    gae(table, inputs)
    group_advantages(table, inputs)
    corrections(table, inputs)


def policy_losses(table: Comparisons, inputs: Inputs) -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.25,
        clip_ratio_c=1.5,
    )
    clip: dict[str, Any] = {"ratio_eps_low": 0.1, "ratio_eps_high": 0.25, "needs_entropy": False}

    def add(
        name: str, ours: PPOPolicyLoss, verl: str, mode: str, rows: bool, why: str = ""
    ) -> None:
        advantages = inputs.row_advantages if rows else inputs.token_advantages
        table.add(
            name,
            lambda leaf: inputs.loss(ours, leaf, advantages=advantages),
            lambda leaf: core_algos.get_policy_loss_fn(verl)(
                inputs.prev_logprobs, leaf, advantages, inputs.mask, mode, config
            )[0],
            inputs.logprobs,
            why,
        )

    dual = {**clip, "dual_clip": 1.5}
    add("policy, dual clip", PPOPolicyLoss(**dual), "vanilla", "token-mean", False)
    add(
        "policy, sequence mean",
        PPOPolicyLoss(**dual, aggregation="sequence_mean"),
        "vanilla",
        "seq-mean-token-mean",
        False,
    )
    add(
        "policy, fixed length",
        PPOPolicyLoss(**dual, aggregation="fixed_length", max_response_length=FULL_WIDTH),
        "vanilla",
        "seq-mean-token-sum-norm",
        False,
    )
    gspo = PPOPolicyLoss(**clip, ratio_level="sequence", aggregation="sequence_mean")
    add("GSPO", gspo, "gspo", "seq-mean-token-mean", True)
    add(
        "GSPO, token advantages",
        gspo,
        "gspo",
        "seq-mean-token-mean",
        False,
        "its gradient goes to each token, ours through the row's ratio",
    )
    add("CISPO", PPOPolicyLoss(**clip, surrogate="cispo"), "cispo", "token-mean", False)


def corrections(table: Comparisons, inputs: Inputs) -> None:
    """Compare weights, masks and metrics of rollouts by another policy."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    mask = inputs.mask.bool()
    log_ratio = inputs.prev_logprobs - inputs.ref_logprobs  # as if the reference had sampled
    counts = Denominators(inputs.mask.sum(), inputs.ones.sum())
    average = BatchAverage(mask, counts)
    for name, threshold, section in (
        ("token weights", 1.5, CorrectionConfig("token", (0.0, 1.5))),
        ("token weights, masked", "0.7_1.5", CorrectionConfig("token", (0.7, 1.5), "mask")),
        ("sequence weights", 1.5, CorrectionConfig("sequence", (0.0, 1.5))),
        ("sequence weights, masked", "0.7_1.5", CorrectionConfig("sequence", (0.7, 1.5), "mask")),
    ):
        weights, shares = correct(section, log_ratio, average)
        theirs, measures = helper.compute_rollout_correction_weights(
            log_ratio, inputs.mask, section.weights, threshold
        )
        assert weights is not None
        ours = torch.where(mask, weights, 0)
        table.add(name, lambda ours=ours: ours, lambda theirs=theirs: theirs)
        size = effective_sample_size(
            *(shares[key].item() for key in ("importance_weight", "importance_weight_square"))
        )
        expected = measures["rollout_is_eff_sample_size"]
        table.add(
            f"effective sample size, {name}",
            lambda size=size: torch.tensor(size),
            lambda expected=expected: torch.tensor(expected),
        )
    low, high = 0.9, 1.1
    accepted, _ = helper.compute_rollout_rejection_mask(
        log_ratio, inputs.mask, "seq_mean_k1", f"{1 / high}_{1 / low}"
    )
    rejected = geometric_rejection(log_ratio, mask, (low, high))
    table.add("geometric rejection", lambda: inputs.mask * ~rejected[:, None], lambda: accepted)
    measures = helper.compute_offpolicy_metrics(
        inputs.prev_logprobs, inputs.ref_logprobs, inputs.mask
    )
    gaps = gap_metrics(log_ratio, average)
    for ours, theirs in (("kl_k1", "kl"), ("kl_k3", "k3_kl")):
        table.add(
            f"KL(sampler ‖ trainer), {ours[3:]}",
            lambda ours=ours: gaps[ours],
            lambda theirs=theirs: torch.tensor(measures[theirs], dtype=torch.float64),
        )


def values_and_kl(table: Comparisons, inputs: Inputs) -> None:
    from verl.trainer.ppo import core_algos

    table.add(
        "value",
        lambda leaf: inputs.loss(PPOValueLoss(0.2), leaf),
        lambda leaf: core_algos.compute_value_loss(
            leaf, inputs.returns, inputs.old_values, inputs.mask, 0.2
        )[0],
        inputs.values,
    )
    for name in ("k1", "k2", "k3", "abs"):
        table.add(
            f"KL, {name}",
            lambda leaf, name=name: kl_estimate(leaf, inputs.ref_logprobs, name),
            lambda leaf, name=name: core_algos.kl_penalty(leaf, inputs.ref_logprobs, name),
            inputs.logprobs,
        )
    far = inputs.logprobs - 30
    table.add(
        "KL, k3 beyond 10",
        lambda: kl_estimate(far, inputs.ref_logprobs, "k3"),
        lambda: core_algos.kl_penalty(far, inputs.ref_logprobs, "k3"),
        why="it clamps k3 to ±10, ours is not clamped by default",
    )


def gae(table: Comparisons, inputs: Inputs) -> None:
    from verl.trainer.ppo import core_algos

    for name, mask in (("GAE, whitened", inputs.mask), ("GAE, gaps, whitened", inputs.holes)):

        def ours(mask: Tensor = mask) -> Tensor:
            advantages, returns = generalized_advantage_estimate(
                inputs.values, inputs.returns, mask, 0.97, 0.9
            )
            return torch.stack([masked_whiten(advantages, mask), returns]) * mask

        def theirs(mask: Tensor = mask) -> Tensor:
            result = core_algos.compute_gae_advantage_return(
                inputs.returns, inputs.values, mask, 0.97, 0.9
            )
            return torch.stack(result) * mask

        table.add(name, ours, theirs)


def group_advantages(table: Comparisons, inputs: Inputs) -> None:
    from verl.trainer.ppo import core_algos

    alone = "its group of one keeps the reward, ours gets 0"
    functions = core_algos.ADV_ESTIMATOR_REGISTRY

    def add(
        estimator: CriticFreeEstimator, verl: str, groups: Tensor, why: str = "", **options: float
    ) -> None:
        rewards = token_rewards(inputs.rewards, None, inputs.mask, 0.0)
        uneven = groups is inputs.uneven_groups
        name = f"{estimator}, uneven groups" if uneven else estimator
        # verl's vectorised functions bear the same name as what they compute.
        table.add(
            f"{name} (vectorised)" if verl.endswith("vectorized") else name,
            lambda: token_advantages(inputs.rewards, groups, inputs.mask, inputs.ones, estimator),
            lambda: (
                functions[verl](
                    token_level_rewards=rewards.clone(),
                    response_mask=inputs.mask,
                    index=groups.numpy(),
                    **options,
                )[0]
                * inputs.mask
            ),
            why=why,
        )

    for groups, why in ((inputs.groups, ""), (inputs.uneven_groups, alone)):
        add("rloo", "rloo", groups, why)
        add("rloo", "rloo_vectorized", groups)
        add("grpo", "grpo", groups, why)
        add("dr_grpo", "grpo", groups, why, norm_adv_by_std_in_grpo=False)
        add("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", groups, why)
        add("grpo", "grpo_vectorized", groups, why)
    penalty = 0.1 * (inputs.prev_logprobs - inputs.ref_logprobs)
    for name, mask in (("", inputs.mask), (", gaps", inputs.holes)):
        table.add(
            f"reinforce_plus_plus with KL{name}",
            lambda mask=mask: token_advantages(
                inputs.rewards,
                inputs.groups,
                mask,
                inputs.ones,
                "reinforce_plus_plus",
                penalty=penalty,
                discount=0.97,
            ),
            lambda mask=mask: core_algos.compute_reinforce_plus_plus_outcome_advantage(
                token_rewards(inputs.rewards, penalty, mask, 1.0),
                mask,
                config=SimpleNamespace(gamma=0.97),
            )[0],
        )


if __name__ == "__main__":
    main("verl", compare)
