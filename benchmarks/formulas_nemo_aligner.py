"""Our formulas against NeMo-Aligner's. Run by `benchmarks.formulas`.

It needs versions of its dependencies that have gone. Its formulas need none of them.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate
from aligner.losses.groups import group_advantages
from aligner.losses.preference import (
    DPOLoss,
    IPOLoss,
    KTOLoss,
    PairwiseLoss,
    RPODistance,
    RPOLoss,
    kto_kl_baseline,
)
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from benchmarks.formulas_cases import ROWS, Comparisons, Inputs, main, without

without("nemo", "megatron", "lightning", "apex", "hydra", "omegaconf", "jsonlines", "flask")
MODELS = "nemo_aligner.models.nlp.gpt"
CHOSEN_FIRST = torch.cat([torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)])


def compare(table: Comparisons) -> None:
    inputs = Inputs()
    pair_losses(table, inputs)
    kto(table, inputs)
    reward_models(table, inputs)
    advantages(table, inputs)


def pair_losses(table: Comparisons, inputs: Inputs) -> None:
    module: Any = importlib.import_module(f"{MODELS}.megatron_gpt_dpo_model")
    peer = module.MegatronGPTDPOModel
    module.parallel_state = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    labels = torch.where(inputs.mask.bool(), 1, -100)[CHOSEN_FIRST]
    truths = inputs.rewards

    def preference(leaf: Tensor, kind: str, average: bool = False) -> Tensor:
        model = bound(
            peer,
            ("get_reduced_masked_logps", "split_output_tensor"),
            preference_loss=kind,
            ref_policy_kl_penalty=0.2,
            gt_reward_scale=1.5,
        )
        return peer.loss_func(
            model,
            leaf[CHOSEN_FIRST],
            inputs.ref_logprobs[CHOSEN_FIRST],
            labels,
            truths[CHOSEN_FIRST],
            average_log_probs=average,
        )[0]

    def with_sft(leaf: Tensor) -> Tensor:
        model = bound(peer, ("get_reduced_masked_logps", "split_output_tensor"))
        term = peer.sft_loss_func(model, leaf[CHOSEN_FIRST], labels, average_log_probs=True)
        return preference(leaf, "dpo") + 0.3 * term

    def add(name: str, ours: PairwiseLoss, theirs: Any) -> None:
        columns = {"ground_truth_rewards": truths}
        table.add(name, lambda leaf: inputs.loss(ours, leaf, **columns), theirs, inputs.logprobs)

    add("DPO", DPOLoss(0.2), lambda leaf: preference(leaf, "dpo"))
    add("DPO, averaged", DPOLoss(0.2, average_logprobs=True), lambda x: preference(x, "dpo", True))
    add("DPO with SFT term, averaged", DPOLoss(0.2, 0.3), with_sft)
    add("IPO", IPOLoss(0.2), lambda leaf: preference(leaf, "ipo"))
    distances: dict[RPODistance, str] = {
        "square": "rpo_sq",
        "forward_kl": "rpo_fwd_kl",
        "backward_kl": "rpo_bwd_kl",
    }
    for distance, kind in distances.items():
        loss = RPOLoss(0.2, distance=distance, reward_scale=1.5)
        add(f"RPO, {distance}", loss, lambda leaf, kind=kind: preference(leaf, kind))


def kto(table: Comparisons, inputs: Inputs) -> None:
    module: Any = importlib.import_module(f"{MODELS}.megatron_gpt_kto_model")
    peer = module.MegatronGPTKTOModel
    module.average_losses_across_data_parallel_group = lambda losses: losses[0]  # one rank
    desirable = torch.arange(ROWS) % 3 == 0
    drifted = inputs.ref_logprobs + 0.2  # the mismatched rows

    def ours(leaf: Tensor) -> Tensor:
        baseline = kto_kl_baseline(drifted, inputs.ref_logprobs, inputs.mask, inputs.ones)
        loss = KTOLoss(0.2, desirable_weight=1.5, undesirable_weight=0.75)
        columns = {"desirable": desirable, "kl_baseline": baseline.expand(ROWS)}
        return inputs.loss(loss, leaf, **columns)

    def theirs(leaf: Tensor) -> Tensor:
        model = bound(
            peer,
            ("get_reduced_masked_logps", "split_output_tensor"),
            ref_policy_kl_penalty=0.2,
            desirable_loss_weight=1.5,
            undesirable_loss_weight=0.75,
        )
        labels = torch.where(inputs.mask.bool(), 1, -100)
        return peer.loss_func(
            model,
            torch.cat([leaf, drifted]),
            torch.cat([inputs.ref_logprobs, inputs.ref_logprobs]),
            torch.cat([labels, labels]),
            desirable.long(),
        )[0]

    table.add("KTO", ours, theirs, inputs.logprobs)


def reward_models(table: Comparisons, inputs: Inputs) -> None:
    ranking = importlib.import_module(f"{MODELS}.megatron_gpt_reward_model").MegatronGPTRewardModel
    rating = importlib.import_module(
        f"{MODELS}.megatron_gpt_regression_reward_model"
    ).MegatronGPTRegressionRewardModel
    lengths = torch.ones(ROWS, dtype=torch.int64)
    table.add(
        "Bradley–Terry, plain",
        lambda leaf: inputs.loss(BradleyTerryLoss(), leaf.unsqueeze(1), input_lengths=lengths),
        lambda leaf: ranking.loss_func(
            bound(ranking, ("split_output_tensor",)), leaf[CHOSEN_FIRST]
        )[0],
        inputs.values[:, 0],
    )
    strengths = inputs.rewards.abs()
    for variant in ("plain", "margin", "scaled"):

        def pair_by_pair(leaf: Tensor, variant: str = variant) -> Tensor:
            name = "regular_bt" if variant == "plain" else f"{variant}_bt"
            model = SimpleNamespace(cfg=SimpleNamespace(loss_func=name))
            losses = []
            for row in range(0, ROWS, 2):
                scores = leaf[row : row + 2, None].expand(2, 5)  # it reads the fifth attribute
                label = -strengths[row].reshape(1, 1)  # negative: the first row is the chosen one
                losses.append(rating.bt_loss_func(model, scores, label))
            return torch.stack(losses).mean()

        table.add(
            f"Bradley–Terry, {variant}, attributes",
            lambda leaf, variant=variant: inputs.loss(
                BradleyTerryLoss(variant),
                leaf.unsqueeze(1),
                input_lengths=lengths,
                preference_strengths=strengths,
            ),
            pair_by_pair,
            inputs.values[:, 0],
        )
    settings = SimpleNamespace(cfg={})
    scores, ratings = inputs.values[:, :3], inputs.returns[:, :3]
    pooled = "it takes the mean over all ratings of a micro-batch, ours over rows first"
    for name, missing, why in (
        ("attribute regression", torch.zeros(ROWS, 3, dtype=torch.bool), ""),
        ("attribute regression, ratings missing", inputs.returns[:, 3:6] > 1, pooled),
    ):
        missing[:, 0] = False
        table.add(
            name,
            lambda leaf, missing=missing: inputs.loss(
                AttributeRegressionLoss(),
                leaf.unsqueeze(1),
                input_lengths=lengths,
                attributes=ratings,
                attribute_mask=~missing,
            ),
            lambda leaf, missing=missing: rating.reg_loss_func(
                settings, leaf, torch.where(missing, -100.0, ratings)
            ),
            scores,
            why,
        )


def advantages(table: Comparisons, inputs: Inputs) -> None:
    utils = importlib.import_module("nemo_aligner.utils.ppo_utils")
    gaps = "a gap is a step with reward 0 and value 0, ours carries across it"
    for name, mask, why in (("GAE", inputs.mask, ""), ("GAE, gaps", inputs.holes, gaps)):
        table.add(
            name,
            lambda mask=mask: torch.stack(
                generalized_advantage_estimate(inputs.values, inputs.returns, mask, 0.97, 0.9)
            ),
            lambda mask=mask: (
                torch.stack(
                    utils.calculate_advantages_and_returns(
                        inputs.values, inputs.returns, 0.97, 0.9, mask
                    )
                )
                * mask
            ),
            why=why,
        )
    counts = torch.ones(ROWS)
    counts[4] = 0
    prompts = inputs.uneven_groups.unsqueeze(1)
    rewards = inputs.rewards.float()  # it multiplies by a float32 matrix
    table.add(
        "rloo, uneven groups, a sample masked",
        lambda: group_advantages(rewards, inputs.uneven_groups, counts, "rloo"),
        lambda: (rewards - utils.calculate_rloo_baseline(prompts, rewards, counts)) * counts,
    )


def bound(peer: type, methods: tuple[str, ...], **attributes: Any) -> SimpleNamespace:
    """Return a substitute of a model: ``attributes`` and some methods of its class."""
    model = SimpleNamespace(**attributes)
    for name in methods:
        setattr(model, name, getattr(peer, name).__get__(model))
    return model


if __name__ == "__main__":
    main("NeMo-Aligner", compare)
