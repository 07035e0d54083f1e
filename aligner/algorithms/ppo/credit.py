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

    ``kl_in_reward`` means that the reward contains a KL penalty. ``rollouts_per_prompt`` adjacent
    rows answer one prompt. ``max_length`` limits the tokens of a response. ``estimator`` is the
    user's estimator if ``trainer.advantage`` names one.
    """

    trainer: TrainerPPOConfig
    kl_in_reward: bool
    rollouts_per_prompt: int
    max_length: int
    estimator: UserEstimator | None = None

    def shape(self, batch: BatchedDataDict) -> None:
        """Add ``shaped_rewards`` float32 [B] and ``sample_mask`` to a batch with ``rewards``.

        A batch of conversations also gets ``shaped_turn_rewards`` float32 [B, S].
        """
        trainer = self.trainer
        # Conversations: shaped rewards of turns and their sum.
        if "turn_ids" in batch:
            turn_rewards, batch["sample_mask"] = shape_turn_rewards(
                batch, trainer.reward, trainer.improper_end
            )
            batch["shaped_turn_rewards"] = turn_rewards
            batch["shaped_rewards"] = turn_rewards.double().sum(1).float()
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
        ``ref_logprobs`` and ``values``. ``beta`` is the weight of the KL penalty. Returns metrics,
        and the mean over samples of the KL to the reference, summed over a response. It is 0
        without a reference.
        """
        trainer, shaped = self.trainer, batch["shaped_rewards"]
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        kl = None
        if "ref_logprobs" in batch:
            kl = batch["token_mask"] * kl_estimate(
                batch["prev_logprobs"], batch["ref_logprobs"], trainer.kl_estimator
            )
        # Advantages, averaged and whitened over states.
        penalty = kl if self.kl_in_reward else None
        states = mask * self._states(batch)
        if "values" in batch:
            metrics = self._with_critic(batch, shaped, penalty, beta, states)
        else:
            metrics = self._without_critic(batch, shaped, penalty, beta)
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
        return metrics | self._kl_metrics(kl, mask, mean.item(), beta, per_sample), per_sample

    def _with_critic(
        self, batch: BatchedDataDict, shaped: Tensor, kl: Tensor | None, beta: float, states: Tensor
    ) -> dict[str, float]:
        """Add generalised advantage estimates, or the user's, with ``returns`` for the critic."""
        if self.estimator is None:
            shaped_rewards = batch.get("shaped_turn_rewards", shaped)
            turns = batch.get("turn_ids")
            rewards = token_rewards(shaped_rewards, kl, batch["token_mask"], beta, turn_ids=turns)
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
            batch["advantages"], batch["returns"] = self._by_user(self.estimator, batch, kl, beta)
        # Metrics of the critic's targets and of its values before training.
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
        """Add advantages with other responses to the prompt as baseline (`group_advantages`)."""
        advantage = self.trainer.advantage
        groups = self._groups(batch)
        by_turn = advantage.credit == "turn" and "turn_ids" in batch
        compared = batch["shaped_turn_rewards"] if by_turn else shaped
        if self.estimator is None:
            batch["advantages"] = token_advantages(
                compared,
                groups,
                batch["token_mask"],
                batch["sample_mask"],
                cast(CriticFreeEstimator, advantage.estimator),  # the function checks the name
                penalty=None if kl is None else beta * kl,
                discount=self.trainer.discount_factor,
                batch_baseline=advantage.batch_baseline,
                turn_ids=batch.get("turn_ids"),
            )
        else:
            batch["advantages"], _ = self._by_user(self.estimator, batch, kl, beta)
        # The share of samples whose group has different rewards.
        turns = batch["turn_ids"] if by_turn else None
        signal = has_reward_variance(compared, groups, batch["sample_mask"], turns).float()
        return {"train_rollouts/samples_with_signal": signal.mean().item()}

    def _by_user(
        self, estimator: UserEstimator, batch: BatchedDataDict, kl: Tensor | None, beta: float
    ) -> tuple[Tensor, Tensor | None]:
        columns = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return estimator(
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
        """Return a mask of the states whose values, returns and advantages count, bool [B, S].

        These are the states before every token, or with ``timestep=turn`` before every turn.
        """
        if self.trainer.timestep == "token" or "turn_ids" not in batch:
            return batch["token_mask"] > 0
        turns = batch["turn_ids"]
        previous = torch.nn.functional.pad(turns, (1, 0))[:, :-1]
        return (turns > 0) & (turns != previous)

    def _groups(self, batch: BatchedDataDict) -> Tensor:
        """Return the index of each row's prompt, int64 [B]."""
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
    prefix: str, values: Mapping[str, Tensor], names: tuple[str, ...] | None = None
) -> dict[str, float]:
    return {
        f"{prefix}_{name}": value.item()
        for name, value in values.items()
        if names is None or name in names
    }
