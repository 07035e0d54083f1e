"""Our formulas against TRL's. Run by `benchmarks.formulas` in TRL's environment.

Most of TRL's losses are methods of trainers that run a model. The model here has two tokens: the
first one, which is the right one everywhere, has just the log-prob it is to have.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.losses.groups import soft_overlong_penalty
from aligner.losses.masked import masked_whiten
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, SimPOLoss, kto_kl_baseline
from aligner.losses.reward import BradleyTerryLoss
from benchmarks.formulas_cases import LENGTH, ROWS, Comparisons, Inputs, main, without

without("requests", "urllib3")  # for its client of a generation server
CHOSEN_FIRST = torch.cat([torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)])


def compare(table: Comparisons) -> None:
    inputs = Inputs()
    policy_losses(table, inputs)
    pair_losses(table, inputs)
    kto(table, inputs)
    compare_others(table, inputs)


def policy_losses(table: Comparisons, inputs: Inputs) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    def theirs(leaf: Tensor, advantages: Tensor, loss_type: str, level: str, beta: float) -> Tensor:
        trainer = fake_trainer(
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=level,
            beta=beta,
            loss_type=loss_type,
            epsilon_low=0.1,
            epsilon_high=1.25 if loss_type == "cispo" else 0.25,  # there it is the bound itself
            use_vllm=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=20,
            args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, leaf.detach(), None),
        )
        none = torch.zeros(ROWS, 0, dtype=torch.int64)
        batch = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            "completion_mask": inputs.mask,
            "advantages": advantages,
            "old_per_token_logps": inputs.prev_logprobs,
            "ref_per_token_logps": inputs.ref_logprobs,
            "num_items_in_batch": inputs.mask.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, None, batch)

    clip = {"ratio_eps_low": 0.1, "ratio_eps_high": 0.25, "needs_entropy": False}
    row_wise = {**clip, "aggregation": "sequence_mean"}
    with_kl = {"kl_coefficient": 0.2, "kl_estimator": "k3"}
    fixed = {"aggregation": "fixed_length", "max_response_length": 20}
    unbounded = {**clip, "ratio_eps_low": 1.0, "surrogate": "cispo"}
    for name, options, loss_type, level in (
        ("policy", clip, "dapo", "token"),
        ("policy and KL, k3", {**clip, **with_kl}, "dapo", "token"),
        ("policy and KL, sequence mean", {**row_wise, **with_kl}, "grpo", "token"),
        ("policy, fixed length", {**clip, **fixed}, "dr_grpo", "token"),
        ("GSPO", {**row_wise, "ratio_level": "sequence"}, "grpo", "sequence"),
        ("CISPO, upper bound only", unbounded, "cispo", "token"),
    ):
        advantages = inputs.row_advantages if level == "sequence" else inputs.token_advantages
        beta = 0.2 if "KL" in name else 0.0
        table.add(
            name,
            lambda leaf, options=options, advantages=advantages: inputs.loss(
                PPOPolicyLoss(**options), leaf, advantages=advantages
            ),
            lambda leaf, advantages=advantages, loss_type=loss_type, level=level, beta=beta: theirs(
                leaf, advantages, loss_type, level, beta
            ),
            inputs.logprobs,
        )


def pair_losses(table: Comparisons, inputs: Inputs) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer

    reference = inputs.sums(inputs.ref_logprobs)

    def dpo(leaf: Tensor, *loss_types: str) -> Tensor:
        trainer = fake_trainer(
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=loss_types,
            loss_weights=[1.0, 0.3][: len(loss_types)],
            beta=0.2,
            label_smoothing=0.0,
            use_weighting=False,
        )
        batch = {
            "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            "completion_mask": inputs.mask[CHOSEN_FIRST].long(),
            "ref_chosen_logps": reference[0::2],
            "ref_rejected_logps": reference[1::2],
        }
        return DPOTrainer._compute_loss(trainer, two_tokens(leaf[CHOSEN_FIRST]), batch, False)

    def cpo(rows: Tensor, loss_type: str, **options: float) -> Tensor:
        trainer = fake_trainer(
            **{"alpha": 0.0, "beta": 0.2, "label_smoothing": 0.0, "loss_type": loss_type, **options}
        )
        return CPOTrainer.cpo_loss(trainer, rows[0::2], rows[1::2])[0].mean()

    def log_ratios(leaf: Tensor) -> Tensor:
        return inputs.sums(leaf) - reference

    lengths = inputs.mask.sum(1)
    token_mean = "its SFT term is the mean over all chosen tokens, ours over rows first"
    for name, ours, theirs, why in (
        ("DPO", DPOLoss(0.2), lambda leaf: dpo(leaf, "sigmoid"), ""),
        (
            "DPO with SFT term",
            DPOLoss(0.2, 0.3),
            lambda leaf: dpo(leaf, "sigmoid", "sft"),
            token_mean,
        ),
        (
            "cDPO (CPO on log-ratios)",
            DPOLoss(0.2, label_smoothing=0.1),
            lambda leaf: cpo(log_ratios(leaf), "sigmoid", label_smoothing=0.1),
            "",
        ),
        ("IPO (CPO on log-ratios)", IPOLoss(0.2), lambda leaf: cpo(log_ratios(leaf), "ipo"), ""),
        ("IPO, averaged", IPOLoss(0.2, average_logprobs=True), lambda leaf: dpo(leaf, "ipo"), ""),
        (
            "IPO (DPO trainer)",
            IPOLoss(0.2),
            lambda leaf: dpo(leaf, "ipo"),
            "it divides by the response's length, ours sums by default",
        ),
        (
            "SimPO",
            SimPOLoss(2.0, target_margin=0.7),
            lambda leaf: cpo(inputs.sums(leaf) / lengths, "simpo", beta=2.0, simpo_gamma=0.7),
            "",
        ),
    ):
        table.add(
            name, lambda leaf, ours=ours: inputs.loss(ours, leaf), theirs, inputs.logprobs, why
        )


def kto(table: Comparisons, inputs: Inputs) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    desirable = torch.arange(ROWS) % 3 == 0
    # The mismatched rows: other log-probs on the same mask.
    drifted = inputs.ref_logprobs + 0.2

    def ours(leaf: Tensor) -> Tensor:
        baseline = kto_kl_baseline(drifted, inputs.ref_logprobs, inputs.mask, inputs.ones)
        loss = KTOLoss(0.2, desirable_weight=1.5, undesirable_weight=0.75)
        columns = {"desirable": desirable, "kl_baseline": baseline.expand(ROWS)}
        return inputs.loss(loss, leaf, **columns)

    def theirs(leaf: Tensor) -> Tensor:
        trainer = fake_trainer(
            aux_loss_enabled=False,
            calculate_KL=True,
            precompute_ref_logps=True,
            loss_type="kto",
            beta=0.2,
            desirable_weight=1.5,
            undesirable_weight=0.75,
            _compute_kl_logps=lambda *_: inputs.sums(drifted),
        )
        batch = {
            "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            "attention_mask": inputs.mask,
            "completion_mask": inputs.mask.long(),
            "label": desirable,
            "ref_logps": inputs.sums(inputs.ref_logprobs),
            "ref_KL_logps": inputs.sums(inputs.ref_logprobs),
        }
        return KTOTrainer._compute_loss(trainer, two_tokens(leaf), batch, False)

    table.add("KTO", ours, theirs, inputs.logprobs)


def compare_others(table: Comparisons, inputs: Inputs) -> None:
    from trl.experimental.ppo.ppo_trainer import masked_whiten as peer_whiten
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer.reward_trainer import RewardTrainer

    strengths = inputs.rewards.abs()
    for variant in ("plain", "margin"):

        def reward_loss(leaf: Tensor, variant: str = variant) -> Tensor:
            batch: dict[str, Any] = {"attention_mask": inputs.mask}
            if variant == "margin":
                batch["margin"] = strengths[0::2]
            trainer = fake_trainer(args=SimpleNamespace(center_rewards_coefficient=None))
            outputs = SimpleNamespace(logits=leaf[CHOSEN_FIRST].unsqueeze(1))
            return RewardTrainer.compute_loss(trainer, lambda **_: outputs, batch)

        table.add(
            f"Bradley–Terry, {variant}",
            lambda leaf, variant=variant: inputs.loss(
                BradleyTerryLoss(variant),
                leaf.unsqueeze(1),
                input_lengths=torch.ones(ROWS, dtype=torch.int64),
                preference_strengths=strengths,
            ),
            reward_loss,
            inputs.values[:, 0],
        )
    table.add(
        "whitening",
        lambda: masked_whiten(inputs.values, inputs.mask),
        lambda: peer_whiten(inputs.values, inputs.mask) * inputs.mask,
    )
    lengths = torch.arange(1, 21)
    table.add(
        "overlong penalty",
        lambda: soft_overlong_penalty(lengths, torch.ones(20, dtype=torch.bool), 20, 8),
        lambda: torch.tensor(
            get_soft_overlong_punishment(20, 8)([[0] * length for length in lengths.tolist()])
        ),
    )


def fake_trainer(**attributes: Any) -> SimpleNamespace:
    """Return a substitute of a trainer: ``attributes``, and one process that evaluates."""
    gather = {name: lambda value, **_: value for name in ("gather", "gather_for_metrics", "reduce")}
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", num_processes=1, **gather),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        **attributes,
    )


def two_tokens(logprobs: Tensor) -> Any:
    """Return a model in which token 0 at position t has log-prob ``logprobs[:, t]`` [B, S]."""
    ahead = torch.roll(logprobs, -1, dims=1)
    logits = torch.stack([ahead, torch.log1p(-ahead.exp())], dim=-1)
    return lambda **_: SimpleNamespace(logits=logits)


if __name__ == "__main__":
    main("TRL", compare)
