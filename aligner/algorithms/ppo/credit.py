"""Credit assignment: from rewards of responses to advantages of tokens.

rewards ─► shaped, some samples left out ─► less β·KL ─► advantages (and the critic's targets)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.algorithms.rollout.rollout import shape_rewards, shape_turn_rewards
from aligner.config import TrainerPPOConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.advantages import (
    CriticFreeEstimator,
    generalized_advantage_estimate,
    has_reward_variance,
    soft_overlong_penalty,
    token_advantages,
    token_rewards,
)
from aligner.losses.kl import kl_estimate
from aligner.losses.masked import masked_whiten
from aligner.observe.diagnostics import explained_variance, statistics


@dataclass(frozen=True)
class Credit:
    """Credit assignment of a run.

    ``kl_in_reward``: the reward carries a KL penalty. ``rollouts_per_prompt``: adjacent rows that
    answer one prompt. ``max_length``: most tokens of a response. ``own``: the user's estimator,
    where ``trainer.advantage`` names one.
    """

    trainer: TrainerPPOConfig
    kl_in_reward: bool
    rollouts_per_prompt: int
    max_length: int
    own: UserEstimator | None = None

    def shape(self, batch: BatchedDataDict) -> None:
        """Add ``shaped_rewards`` float32 [B] and ``sample_mask`` to a rollout with ``rewards``.

        To one of conversations also ``shaped_turn_rewards`` float32 [B, S].
        """
        trainer = self.trainer
        if "turn_ids" in batch:
            each, batch["sample_mask"] = shape_turn_rewards(
                batch, trainer.reward, trainer.improper_end
            )
            batch["shaped_turn_rewards"] = each
            batch["shaped_rewards"] = each.double().sum(1).float()
            return
        shaped, batch["sample_mask"] = shape_rewards(
            batch["rewards"], batch["is_end"], trainer.reward, trainer.improper_end
        )
        if trainer.reward.overlong_cache is not None:
            lengths = batch["input_lengths"] - batch["prompt_lengths"]
            shaped = shaped + soft_overlong_penalty(
                lengths, batch["is_end"], self.max_length, trainer.reward.overlong_cache
            )
        batch["shaped_rewards"] = shaped

    def assign(self, batch: BatchedDataDict, beta: float) -> tuple[dict[str, float], float]:
        """Add ``advantages`` and, with a critic, ``returns`` to a shaped rollout.

        Reads what the rollout has of ``shaped_rewards``, ``sample_mask``, ``prev_logprobs``,
        ``ref_logprobs`` and ``values``. ``beta``: weight of the KL penalty. Returns what there is
        to see, and the KL to the reference summed over a response, mean over samples (0 without a
        reference).
        """
        trainer, shaped = self.trainer, batch["shaped_rewards"]
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        kl = None
        if "ref_logprobs" in batch:
            kl = batch["token_mask"] * kl_estimate(
                batch["prev_logprobs"], batch["ref_logprobs"], trainer.kl_estimator
            )
        charged = kl if self.kl_in_reward else None
        states = mask * self._states(batch)
        if "values" in batch:
            metrics = self._with_critic(batch, shaped, charged, beta, states)
        else:
            metrics = self._without_critic(batch, shaped, charged, beta)
        metrics |= _named("train_rollouts/advantages", statistics(batch["advantages"], states))
        if trainer.normalize_advantages:
            batch["advantages"] = masked_whiten(batch["advantages"], mask, over=states)
        scored = batch["is_scored"] + batch["sample_mask"] if "is_scored" in batch else None
        mean = statistics(shaped, scored)["mean"]
        metrics["train_rollouts/shaped_rewards"] = mean.item()
        metrics["train_rollouts/masked_samples"] = int((batch["sample_mask"] == 0).sum())
        if kl is None:
            return metrics, 0.0
        per_sample = kl.sum(1).mean().item()
        return metrics | self._kl_metrics(kl, mask, mean.item(), beta, per_sample), per_sample

    def _with_critic(
        self,
        batch: BatchedDataDict,
        shaped: Tensor,
        kl: Tensor | None,
        beta: float,
        states: Tensor,
    ) -> dict[str, float]:
        """Generalised advantage estimation, or the user's; ``returns`` are the critic's targets."""
        if self.own is None:
            each = batch.get("shaped_turn_rewards", shaped)
            turns = batch.get("turn_ids")
            rewards = token_rewards(each, kl, batch["token_mask"], beta, turn_ids=turns)
            batch["advantages"], batch["returns"] = generalized_advantage_estimate(
                batch["values"],
                rewards,
                batch["token_mask"],
                self.trainer.discount_factor,
                self.trainer.gae_lambda,
                turn_ids=turns,
                timestep=self.trainer.timestep,
            )
        else:
            batch["advantages"], batch["returns"] = self._by_user(self.own, batch, kl, beta)
        explained = explained_variance(batch["values"], batch["returns"], states)
        returns = statistics(batch["returns"], states)
        return {
            **_named("train_rollouts/returns", returns, ("mean", "std")),
            **_named("critic/values", statistics(batch["values"], states)),
            "critic/explained_var": explained.item(),
        }

    def _without_critic(
        self, batch: BatchedDataDict, shaped: Tensor, kl: Tensor | None, beta: float
    ) -> dict[str, float]:
        """Responses to a prompt are each other's baseline (`group_advantages`)."""
        advantage = self.trainer.advantage
        groups = self._groups(batch)
        by_turn = advantage.credit == "turn" and "turn_ids" in batch
        compared = batch["shaped_turn_rewards"] if by_turn else shaped
        if self.own is None:
            batch["advantages"] = token_advantages(
                compared,
                groups,
                batch["token_mask"],
                batch["sample_mask"],
                cast(CriticFreeEstimator, advantage.estimator),  # it refuses any other
                penalty=None if kl is None else beta * kl,
                discount=self.trainer.discount_factor,
                batch_baseline=advantage.batch_baseline,
                turn_ids=batch.get("turn_ids"),
            )
        else:
            batch["advantages"], _ = self._by_user(self.own, batch, kl, beta)
        turns = batch["turn_ids"] if by_turn else None
        signal = has_reward_variance(compared, groups, batch["sample_mask"], turns).float()
        return {"train_rollouts/samples_with_signal": signal.mean().item()}

    def _by_user(
        self, own: UserEstimator, batch: BatchedDataDict, kl: Tensor | None, beta: float
    ) -> tuple[Tensor, Tensor | None]:
        columns = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return own(
            {
                **columns,
                "rewards": batch["shaped_rewards"],
                "groups": self._groups(batch),
                "penalty": torch.zeros_like(batch["token_mask"]) if kl is None else beta * kl,
                "discount_factor": self.trainer.discount_factor,
                "gae_lambda": self.trainer.gae_lambda,
            }
        )

    def _states(self, batch: BatchedDataDict) -> Tensor:
        """States whose values, returns and advantages are counted, bool [B, S]: those before every
        token, or with ``timestep=turn`` before every turn.
        """
        if self.trainer.timestep == "token" or "turn_ids" not in batch:
            return batch["token_mask"] > 0
        turns = batch["turn_ids"]
        before = torch.nn.functional.pad(turns, (1, 0))[:, :-1]
        return (turns > 0) & (turns != before)

    def _groups(self, batch: BatchedDataDict) -> Tensor:
        """Number of each row's prompt, int64 [B]."""
        return torch.arange(batch.size) // self.rollouts_per_prompt

    def _kl_metrics(
        self, kl: Tensor, mask: Tensor, mean: float, beta: float, per_sample: float
    ) -> dict[str, float]:
        penalty = beta * per_sample if self.kl_in_reward else 0.0
        return {
            "train_rollouts/init_policy_kl": ((kl * mask).sum() / mask.sum().clamp(min=1)).item(),
            "train_rollouts/init_policy_kl_per_sample": per_sample,
            "train_rollouts/kl_coefficient": beta,
            "train_rollouts/kl_penalty": penalty,
            "train_rollouts/rewards_with_kl": mean - penalty,
        }


def _named(
    prefix: str, numbers: Mapping[str, Tensor], kept: tuple[str, ...] | None = None
) -> dict[str, float]:
    return {
        f"{prefix}_{name}": number.item()
        for name, number in numbers.items()
        if kept is None or name in kept
    }
