"""Our formulas against OpenRLHF's. Run by `benchmarks.formulas`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate
from aligner.losses.groups import soft_overlong_penalty, token_advantages
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss, kl_estimate
from aligner.losses.preference import DPOLoss, IPOLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.value import PPOValueLoss
from benchmarks.formulas_cases import LENGTH, Comparisons, Inputs, main, without

# Imported by its modules, not used by what is compared.
without("deepspeed", "peft", "pylatexenc", "flash_attn", "optree", "torchdata", "vllm")


def compare(table: Comparisons) -> None:
    inputs = Inputs()
    token_losses(table, inputs)
    pair_losses(table, inputs)
    advantages(table, inputs)
    kl_and_length(table, inputs)


def token_losses(table: Comparisons, inputs: Inputs) -> None:
    from openrlhf.models.loss import PolicyLoss, SFTLoss, ValueLoss

    def add(name: str, ours: PPOPolicyLoss, theirs: PolicyLoss, advantage_values: Tensor) -> None:
        table.add(
            name,
            lambda leaf: inputs.loss(ours, leaf, advantages=advantage_values),
            lambda leaf: theirs(leaf, inputs.prev_logprobs, advantage_values, inputs.mask)[0],
            inputs.logprobs,
        )

    clip: dict[str, Any] = {"ratio_eps_low": 0.1, "ratio_eps_high": 0.25, "needs_entropy": False}
    row_wise: dict[str, Any] = {**clip, "aggregation": "sequence_mean"}
    token, row = inputs.token_advantages, inputs.row_advantages
    add("policy", PPOPolicyLoss(**clip), PolicyLoss(0.1, 0.25), token)
    dual = PPOPolicyLoss(**clip, dual_clip=1.5)
    add("policy, dual clip", dual, PolicyLoss(0.1, 0.25, dual_clip=1.5), token)
    by_row = PolicyLoss(0.1, 0.25, token_level_loss=False)
    add("policy, sequence mean", PPOPolicyLoss(**row_wise), by_row, token)
    gspo = PPOPolicyLoss(**row_wise, ratio_level="sequence")
    add("GSPO", gspo, PolicyLoss(0.1, 0.25, policy_loss_type="gspo"), row)
    table.add(
        "value",
        lambda leaf: inputs.loss(PPOValueLoss(0.2), leaf),
        lambda leaf: ValueLoss(0.2)(leaf, inputs.old_values, inputs.returns, inputs.mask),
        inputs.values,
    )
    table.add(
        "negative log-likelihood",
        lambda leaf: inputs.loss(NegativeLogLikelihoodLoss(), leaf),
        lambda leaf: SFTLoss()(leaf, inputs.mask),
        inputs.logprobs,
    )


def pair_losses(table: Comparisons, inputs: Inputs) -> None:
    from openrlhf.models.loss import DPOLoss as PeerDPOLoss
    from openrlhf.models.loss import PairWiseLoss

    reference = inputs.sums(inputs.ref_logprobs)

    def peer(leaf: Tensor, **options: float) -> Tensor:
        rows = inputs.sums(leaf)
        loss = PeerDPOLoss(0.2, **options)
        return loss(rows[0::2], rows[1::2], reference[0::2], reference[1::2])[0]

    for name, ours, options in (
        ("DPO", DPOLoss(0.2), {}),
        ("cDPO", DPOLoss(0.2, label_smoothing=0.1), {"label_smoothing": 0.1}),
        ("IPO", IPOLoss(0.2), {"ipo": True}),
    ):
        table.add(
            name,
            lambda leaf, ours=ours: inputs.loss(ours, leaf),
            lambda leaf, options=options: peer(leaf, **options),
            inputs.logprobs,
        )
    strengths = inputs.rewards.abs()
    lengths = torch.full_like(inputs.groups, 1)
    for variant, margin in (("plain", None), ("margin", strengths[0::2])):
        table.add(
            f"Bradley–Terry, {variant}",
            lambda leaf, variant=variant: inputs.loss(
                BradleyTerryLoss(variant),
                leaf.unsqueeze(1),
                input_lengths=lengths,
                preference_strengths=strengths,
            ),
            lambda leaf, margin=margin: PairWiseLoss()(leaf[0::2], leaf[1::2], margin),
            inputs.values[:, 0],
        )


def advantages(table: Comparisons, inputs: Inputs) -> None:
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as Maker

    gaps = "a gap is a step with reward 0 and value 0, ours carries across it"
    for name, mask, why in (("GAE", inputs.mask, ""), ("GAE, gaps", inputs.holes, gaps)):
        table.add(
            name,
            lambda mask=mask: torch.stack(
                generalized_advantage_estimate(inputs.values, inputs.returns, mask, 0.97, 0.9)
            ),
            lambda mask=mask: (
                torch.stack(
                    Maker.get_advantages_and_returns(
                        None, inputs.values, inputs.returns, mask, 0.97, 0.9
                    )
                )
                * mask
            ),
            why=why,
        )

    def theirs(estimator: str, penalty: Tensor | None, discount: float) -> Tensor:
        algorithm = SimpleNamespace(
            estimator=estimator, gamma=discount, lambd=1.0, no_std_norm=False
        )
        settings = SimpleNamespace(
            algo=SimpleNamespace(advantage=algorithm),
            rollout=SimpleNamespace(n_samples_per_prompt=4),
            reward=SimpleNamespace(clip_range=None),
        )
        maker = SimpleNamespace(
            strategy=SimpleNamespace(args=settings),
            kl_ctl=SimpleNamespace(value=1.0),
            advantage_estimator=estimator,
            get_cumulative_returns=lambda *args: Maker.get_cumulative_returns(None, *args),
        )
        experience = SimpleNamespace(
            rewards=inputs.rewards.clone(),
            index=list(range(len(inputs.rewards))),
            kl=torch.zeros_like(inputs.mask) if penalty is None else penalty,
            action_mask=inputs.mask,
            info={},
        )
        result = Maker.compute_advantages_and_returns(maker, [experience])
        return result[0].advantages * inputs.mask

    population = "it whitens by the population variance, in float32; ours is unbiased"
    tokens = inputs.mask.sum()
    for ours, peer, why in (
        ("rloo", "rloo", ""),
        ("dr_grpo", "dr_grpo", ""),
        ("grpo", "group_norm", "it adds 1e-9 to the deviation, ours 1e-6"),
        ("reinforce_plus_plus", "reinforce", population),
        ("reinforce_plus_plus_baseline", "reinforce_baseline", population),
        ("reinforce, batch mean", "flash_reinforce", ""),
    ):
        plus_plus = ours == "reinforce_plus_plus"
        penalty = 0.1 * (inputs.prev_logprobs - inputs.ref_logprobs) if plus_plus else None
        discount = 0.97 if plus_plus else 1.0
        table.add(
            f"{ours} with KL" if plus_plus else ours,
            lambda ours=ours, penalty=penalty, discount=discount: token_advantages(
                inputs.rewards,
                inputs.groups,
                inputs.mask,
                inputs.ones,
                ours.split(",")[0],
                penalty=penalty,
                discount=discount,
                batch_baseline="batch" in ours,
            ),
            lambda peer=peer, penalty=penalty, discount=discount: theirs(peer, penalty, discount),
            why=why,
        )
        if why == population:
            table.add(
                f"{ours}, apart from the variance",
                lambda ours=ours, penalty=penalty, discount=discount: (
                    token_advantages(
                        inputs.rewards,
                        inputs.groups,
                        inputs.mask,
                        inputs.ones,
                        ours,
                        penalty=penalty,
                        discount=discount,
                    )
                    * (tokens / (tokens - 1)).sqrt()
                ),
                lambda peer=peer, penalty=penalty, discount=discount: theirs(
                    peer, penalty, discount
                ),
            )


def kl_and_length(table: Comparisons, inputs: Inputs) -> None:
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty

    for name in ("k1", "k2", "k3"):
        table.add(
            f"KL, {name}",
            lambda leaf, name=name: kl_estimate(leaf, inputs.ref_logprobs, name),
            lambda leaf, name=name: compute_approx_kl(
                leaf, inputs.ref_logprobs, kl_estimator=name
            ).double(),
            inputs.logprobs,
        )
    lengths = inputs.mask.sum(1).long()

    def theirs() -> Tensor:
        experience = SimpleNamespace(rewards=torch.zeros_like(inputs.ones), response_length=lengths)
        apply_overlong_penalty([experience], LENGTH - 2, 8)
        return experience.rewards

    ended = torch.ones_like(lengths, dtype=torch.bool)
    table.add(
        "overlong penalty",
        lambda: soft_overlong_penalty(lengths, ended, LENGTH - 2, 8).double(),
        theirs,
    )


if __name__ == "__main__":
    main("OpenRLHF", compare)
