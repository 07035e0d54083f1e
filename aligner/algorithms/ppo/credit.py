"""Credit assignment: from rewards of responses to advantages of tokens.

rewards ─► shaped rewards, masked samples ─► minus β·KL ─► advantages (and the critic's targets)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.config import TrainerPPOConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError
from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.groups import (
    CriticFreeEstimator,
    has_reward_variance,
    soft_overlong_penalty,
    token_advantages,
)
from aligner.losses.masked import masked_whiten
from aligner.losses.policy import kl_estimate
from aligner.observe.diagnostics import explained_variance, statistics


class KLController:
    """Coefficient β of the KL penalty in the reward, fixed or adapted to a ``target`` KL.

    After each rollout, ``β ← β · (1 + clip(KL / target - 1, ±0.2) · n_samples / horizon)`` (Ziegler
    et al., 2019, "Fine-Tuning Language Models...", §2.2). KL is summed over the tokens of a sample
    and averaged over samples. The attribute ``value`` is β for the next rollout.
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: int = 1) -> None:
        self.value, self._target, self._horizon = coefficient, target, horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Adapt β to ``current_kl``, the mean KL per sample of a rollout of ``n_samples``."""
        if self._target is not None:
            error = min(max(current_kl / self._target - 1, -0.2), 0.2)
            self.value *= 1 + error * n_samples / self._horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient if it is adaptive, else an empty dictionary."""
        return {} if self._target is None else {"coefficient": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore β. Raises `ConfigError` if β was adaptive and is now fixed, or vice versa."""
        if bool(state) != (self._target is not None):
            kinds = ("an adaptive", "fixed") if state else ("a fixed", "adaptive")
            raise ConfigError(
                f"the run state was saved with {kinds[0]} KL coefficient ({dict(state)}), but the "
                f"configured coefficient is {kinds[1]}. Set trainer.ppo.kl_controller.mode as in "
                "the saved run, or start a new run"
            )
        self.value = float(state.get("coefficient", self.value))


@dataclass(frozen=True)
class Credit:
    """Conversion of the rewards of a rollout to advantages."""

    trainer: TrainerPPOConfig
    kl_in_reward: bool  # the reward contains a KL penalty
    rollouts_per_prompt: int  # number of adjacent rows that are responses to one prompt
    max_length: int  # maximum length of a response, in tokens
    estimator: UserEstimator | None = None  # if ``trainer.advantage`` names one

    def shape(self, batch: BatchedDataDict) -> None:
        """Add ``shaped_rewards`` float32 [B], and for turns ``shaped_turn_rewards`` float32 [B, S].

        A reward R becomes ``clamp(scale * R + shift, ±clip)``. If a limit ended the response,
        ``improper_end.mode="penalize"`` subtracts a penalty (from the last turn), and ``"mask"``
        sets ``sample_mask`` to 0.
        """
        shaping, improper = self.trainer.reward, self.trainer.improper_end
        ended, turns = batch["is_end"].float(), batch.get("turn_ids")
        rewards = batch["rewards" if turns is None else "turn_rewards"]
        shaped = shaping.scale * rewards + shaping.shift
        if shaping.clip is not None:
            shaped = shaped.clamp(-shaping.clip, shaping.clip)
        if improper.mode == "penalize":
            penalties = improper.penalty * (1 - ended)
            if turns is not None:
                penalties = token_rewards(penalties, None, batch["token_mask"], 0.0, turn_ids=turns)
            shaped = shaped - penalties
        elif improper.mode == "mask":
            batch["sample_mask"] = batch["sample_mask"] * ended
        if turns is not None:
            batch["shaped_turn_rewards"] = shaped
            shaped = shaped.double().sum(1).float()
        elif shaping.overlong_cache is not None:
            lengths = batch["input_lengths"] - batch["prompt_lengths"]
            shaped = shaped + soft_overlong_penalty(
                lengths, batch["is_end"], self.max_length, shaping.overlong_cache
            )
        batch["shaped_rewards"] = shaped

    def assign(self, batch: BatchedDataDict, beta: float) -> tuple[dict[str, float], float]:
        """Add ``advantages`` and, with a critic, ``returns``, float32 [B, S] each, to ``batch``.

        Reads the columns of `shape`, ``prev_logprobs``, and if present ``ref_logprobs`` and
        ``values``. ``beta``: weight of the KL penalty. Returns metrics, and the KL to the
        reference, summed over a response and averaged over samples (0 without a reference).
        """
        trainer, shaped = self.trainer, batch["shaped_rewards"]
        # KL of each generated token to the reference policy.
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        kl = None
        if "ref_logprobs" in batch:
            logprobs = (batch["prev_logprobs"], batch["ref_logprobs"])
            kl = batch["token_mask"] * kl_estimate(*logprobs, trainer.kl_estimator)
        # Advantages. A state is a token or a turn (``timestep``). Statistics are over states.
        groups = torch.arange(batch.size) // self.rollouts_per_prompt
        by_turn = trainer.advantage.credit == "turn" and "turn_ids" in batch
        rewards = batch["shaped_turn_rewards"] if by_turn else shaped
        penalty = kl if self.kl_in_reward else None
        batch["advantages"], returns = self._estimate(batch, rewards, groups, penalty, beta)
        states = mask * self._states(batch)
        if returns is not None:
            # The critic's targets, and values of the critic before its training.
            batch["returns"] = returns
            return_statistics = statistics(returns, states)
            metrics = {
                "train_rollouts/returns_mean": return_statistics["mean"].item(),
                "train_rollouts/returns_std": return_statistics["std"].item(),
                **_named("critic/values", statistics(batch["values"], states)),
                "critic/explained_var": explained_variance(batch["values"], returns, states).item(),
            }
        else:
            # The fraction of samples in groups with different rewards.
            turns = batch["turn_ids"] if by_turn else None
            differs = has_reward_variance(rewards, groups, batch["sample_mask"], turns).float()
            metrics = {"train_rollouts/samples_with_signal": differs.mean().item()}
        metrics |= _named("train_rollouts/advantages", statistics(batch["advantages"], states))
        if trainer.normalize_advantages:
            batch["advantages"] = masked_whiten(batch["advantages"], mask, over=states)
        # Mean reward of all samples. Conversations without a reward count only if trained on.
        reward_mask = batch["is_scored"] + batch["sample_mask"] if "is_scored" in batch else None
        mean = statistics(shaped, reward_mask)["mean"]
        metrics["train_rollouts/shaped_rewards"] = mean.item()
        metrics["train_rollouts/masked_samples"] = int((batch["sample_mask"] == 0).sum())
        # Metrics of the KL to the reference policy.
        if kl is None:
            return metrics, 0.0
        per_sample = kl.sum(1).mean().item()
        kl_penalty = beta * per_sample if self.kl_in_reward else 0.0
        metrics |= {
            "train_rollouts/init_policy_kl": ((kl * mask).sum() / mask.sum().clamp(min=1)).item(),
            "train_rollouts/init_policy_kl_per_sample": per_sample,
            "train_rollouts/kl_coefficient": beta,
            "train_rollouts/kl_penalty": kl_penalty,
            "train_rollouts/rewards_with_kl": mean.item() - kl_penalty,
        }
        return metrics, per_sample

    def _estimate(
        self,
        batch: BatchedDataDict,
        rewards: Tensor,
        groups: Tensor,
        kl: Tensor | None,
        beta: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Return advantages and the critic's targets (None without a critic), float [B, S].

        ``rewards``: shaped rewards of responses [B] or turns [B, S]. ``groups``: int64 [B], index
        of each row's prompt.
        """
        # A function of the user.
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
        # Generalized advantage estimation with a critic.
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
        # Critic-free estimators, whose baseline is computed from other responses to the prompt.
        advantages = token_advantages(
            rewards,
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
        """Return bool [B, S], True at generated tokens, or with turns at first tokens of turns."""
        if self.trainer.timestep == "token" or "turn_ids" not in batch:
            return batch["token_mask"] > 0
        turns = batch["turn_ids"]
        previous = torch.nn.functional.pad(turns, (1, 0))[:, :-1]
        return (turns > 0) & (turns != previous)


def _named(prefix: str, values: Mapping[str, Tensor]) -> dict[str, float]:
    return {f"{prefix}_{name}": value.item() for name, value in values.items()}
