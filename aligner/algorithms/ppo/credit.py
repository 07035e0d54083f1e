"""Credit assignment: from rewards of responses to advantages of tokens.

rewards ─► shaped rewards, masked samples ─► minus β·KL ─► advantages (and the critic's targets)
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
from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.groups import (
    CriticFreeEstimator,
    has_reward_variance,
    soft_overlong_penalty,
    token_advantages,
)
from aligner.losses.kl import kl_estimate
from aligner.losses.masked import masked_whiten
from aligner.observe.diagnostics import explained_variance, statistics


@dataclass(frozen=True)
class Credit:
    """Credit assignment of a run. ``rollouts_per_prompt`` adjacent rows answer one prompt."""

    trainer: TrainerPPOConfig
    kl_in_reward: bool  # the reward contains a KL penalty
    rollouts_per_prompt: int
    max_length: int  # of a response, in tokens
    estimator: UserEstimator | None = None  # if ``trainer.advantage`` names one

    def shape(self, batch: BatchedDataDict) -> None:
        """Add ``shaped_rewards`` [B], ``sample_mask`` and any ``shaped_turn_rewards`` [B, S]."""
        trainer = self.trainer
        # Conversations: shaped rewards of turns and their sum.
        if "turn_ids" in batch:
            shaped, batch["sample_mask"] = shape_turn_rewards(
                batch, trainer.reward, trainer.improper_end
            )
            batch["shaped_turn_rewards"] = shaped
            batch["shaped_rewards"] = shaped.double().sum(1).float()
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
        """Add ``advantages`` and, with a critic, ``returns`` to a shaped batch.

        Reads ``shaped_rewards``, ``sample_mask`` and ``prev_logprobs``, and if present
        ``ref_logprobs`` and ``values``. ``beta``: weight of the KL penalty. Returns metrics, and
        the KL to the reference, summed over a response and averaged over samples (0 without a
        reference).
        """
        trainer, shaped = self.trainer, batch["shaped_rewards"]
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        kl = None
        if "ref_logprobs" in batch:
            logprobs = (batch["prev_logprobs"], batch["ref_logprobs"])
            kl = batch["token_mask"] * kl_estimate(*logprobs, trainer.kl_estimator)
        # Advantages, averaged and whitened over states.
        groups = torch.arange(batch.size) // self.rollouts_per_prompt
        by_turn = trainer.advantage.credit == "turn" and "turn_ids" in batch
        compared = batch["shaped_turn_rewards"] if by_turn else shaped
        penalty = kl if self.kl_in_reward else None
        batch["advantages"], returns = self._estimate(batch, compared, groups, penalty, beta)
        states = mask * self._states(batch)
        if returns is not None:
            # The critic's targets, and its values before training.
            batch["returns"] = returns
            spread = statistics(returns, states)
            metrics = {
                "train_rollouts/returns_mean": spread["mean"].item(),
                "train_rollouts/returns_std": spread["std"].item(),
                **_named("critic/values", statistics(batch["values"], states)),
                "critic/explained_var": explained_variance(batch["values"], returns, states).item(),
            }
        else:
            # The share of samples whose group has different rewards.
            turns = batch["turn_ids"] if by_turn else None
            signal = has_reward_variance(compared, groups, batch["sample_mask"], turns).float()
            metrics = {"train_rollouts/samples_with_signal": signal.mean().item()}
        metrics |= _named("train_rollouts/advantages", statistics(batch["advantages"], states))
        if trainer.normalize_advantages:
            batch["advantages"] = masked_whiten(batch["advantages"], mask, over=states)
        # Metrics of rewards, over scored conversations or all samples.
        scored = batch["is_scored"] + batch["sample_mask"] if "is_scored" in batch else None
        mean = statistics(shaped, scored)["mean"]
        metrics["train_rollouts/shaped_rewards"] = mean.item()
        metrics["train_rollouts/masked_samples"] = int((batch["sample_mask"] == 0).sum())
        if kl is None:
            return metrics, 0.0
        per_sample = kl.sum(1).mean().item()
        paid = beta * per_sample if self.kl_in_reward else 0.0
        metrics |= {
            "train_rollouts/init_policy_kl": ((kl * mask).sum() / mask.sum().clamp(min=1)).item(),
            "train_rollouts/init_policy_kl_per_sample": per_sample,
            "train_rollouts/kl_coefficient": beta,
            "train_rollouts/kl_penalty": paid,
            "train_rollouts/rewards_with_kl": mean.item() - paid,
        }
        return metrics, per_sample

    def _estimate(
        self,
        batch: BatchedDataDict,
        compared: Tensor,
        groups: Tensor,
        kl: Tensor | None,
        beta: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Return advantages and, with a critic, its targets.

        ``compared``: shaped rewards [B] or of turns [B, S]. ``groups``: prompt of a row, int64 [B].
        """
        trainer, turns = self.trainer, batch.get("turn_ids")
        if self.estimator is not None:
            columns = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            return self.estimator(
                {
                    **columns,
                    "rewards": batch["shaped_rewards"],
                    "groups": groups,
                    "penalty": torch.zeros_like(batch["token_mask"]) if kl is None else beta * kl,
                    "discount_factor": trainer.discount_factor,
                    "gae_lambda": trainer.gae_lambda,
                }
            )
        if "values" in batch:
            shaped = batch.get("shaped_turn_rewards", batch["shaped_rewards"])
            return generalized_advantage_estimate(
                batch["values"],
                token_rewards(shaped, kl, batch["token_mask"], beta, turn_ids=turns),
                batch["token_mask"],
                trainer.discount_factor,
                trainer.gae_lambda,
                turn_ids=turns,
                timestep=trainer.timestep,
            )
        # Other responses to the prompt are the baseline.
        advantages = token_advantages(
            compared,
            groups,
            batch["token_mask"],
            batch["sample_mask"],
            cast(CriticFreeEstimator, trainer.advantage.estimator),  # the function checks the name
            penalty=None if kl is None else beta * kl,
            discount=trainer.discount_factor,
            batch_baseline=trainer.advantage.batch_baseline,
            turn_ids=turns,
        )
        return advantages, None

    def _states(self, batch: BatchedDataDict) -> Tensor:
        """Return bool [B, S], true at states that count: before every token or every turn."""
        if self.trainer.timestep == "token" or "turn_ids" not in batch:
            return batch["token_mask"] > 0
        turns = batch["turn_ids"]
        previous = torch.nn.functional.pad(turns, (1, 0))[:, :-1]
        return (turns > 0) & (turns != previous)


def _named(prefix: str, values: Mapping[str, Tensor]) -> dict[str, float]:
    return {f"{prefix}_{name}": value.item() for name, value in values.items()}
