"""Rejection sampling (best-of-n fine-tuning): learn the best of one's own responses.

prompts ─► 1 generate n responses each ─► 2 reward ─► 3 keep the best of each prompt
                                                          │
                    5 validate, save ◄── 4 train on them, maximum likelihood
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.rollout.inputs import (
    generation_note,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.prefetch import Rollouts
from aligner.algorithms.rollout.reward_source import load_reward
from aligner.algorithms.rollout.rollout import RolloutSource, prefixed, samples_of, score
from aligner.algorithms.rollout.validation import HeldOut, validate_on_prompts
from aligner.algorithms.run.length import total_steps
from aligner.algorithms.run.loop import StepResult
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import sampling_summary, trained_policy
from aligner.config import RSRunConfig
from aligner.config.rules.checks import check_model_shares
from aligner.data.dataset import PromptSampler
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import columns_of
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.handle import TRAINED_COLUMNS, RoleHandle
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.observe.diagnostics import count_updates, idle_roles, statistics, update_metrics
from aligner.observe.metrics import PhaseTimers
from aligner.rewards.interface import RewardInterface


def train_rs(config: RSRunConfig) -> None:
    """Run rejection sampling from start to end and print where everything is."""
    with Run.open(config) as run:
        config, rs = run.config, run.config.model.rs
        check_model_shares(config, run.world_size)
        prompts = load_prompts(run)
        columns = prompts.train.column_names
        reward = load_reward(config, run.engine, run.tokenizer, columns, run.closing)
        environments = load_environments(run, prompts)
        prompts = of_dry_run(run, prompts)
        for attempt in run.attempts():
            with attempt:
                sampler = prompts.sampler(config)
                steps = total_steps(config, sampler)
                kept = sampler.batch_size * rs.top_n_rollouts
                policy = attempt.start_policy(steps * (kept // config.model.global_batch_size))
                engines = start_generation(config, attempt, policy, prompts.max_length)
                trainer = RSTrainer(
                    config,
                    policy,
                    reward.start(attempt),
                    prompts.train,
                    prompts.validation,
                    sampler,
                    pad_id=run.tokenizer.pad_id,
                    generation=engines,
                    total_steps=steps,
                    val_sets=prompts.sets,
                    rollout_source=environments,
                )
                attempt.closing.callback(trainer.rollouts.close)
                learned = (
                    f"of the samples of a step the best {rs.top_n_rollouts} of every "
                    f"{rs.num_rollouts_per_prompt} are learned: {kept}"
                )
                summary = sampling_summary(
                    config,
                    attempt,
                    prompts.train,
                    steps=steps,
                    trained=[trained_policy(config)],
                    frozen=reward.memory(),
                    restores=["policy", "optimizer", "schedule", "data position"],
                    notes=[learned, *prompts.notes(), *generation_note(engines)],
                )
                with attempt.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


class RSTrainer:
    """Rejection sampling over the handles; `RunLoop` drives it."""

    is_out_of_data = False  # every step takes one batch, so the schedule counts them right

    def __init__(
        self,
        config: RSRunConfig,
        policy: Policy,
        reward: RewardInterface,
        train_prompts: PromptDataset,
        val_prompts: PromptDataset | None,
        sampler: PromptSampler,
        *,
        pad_id: int,
        generation: GenerationInterface | None = None,
        total_steps: int | None = None,
        val_sets: Mapping[str, PromptDataset] | None = None,
        rollout_source: RolloutSource | None = None,
    ) -> None:
        """Arguments as in `aligner.algorithms.ppo.trainer.PPOTrainer`."""
        self.config = config
        self.policy, self.reward = policy, reward
        self.held_out = HeldOut(val_prompts, val_sets or {})
        self.sampler, self.pad_id = sampler, pad_id
        self.generation = generation or policy
        self.total_steps = total_steps
        self.rollouts = Rollouts(
            config, self.generation, train_prompts, sampler, pad_id, rollout_source
        )
        self.loss = NegativeLogLikelihoodLoss()
        self.consumed_samples = 0
        self.updates = 0

    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """One rollout, and one pass over the best of it."""
        rs = self.config.model.rs
        with timers("generate"):
            more = self.total_steps is None or step < self.total_steps
            batch = self.rollouts.take(self.consumed_samples, more=more)
        with timers("reward"):
            metrics = prefixed("train_rollouts", score(self.reward, batch))
        rewards = batch["rewards"].masked_fill(batch["sample_mask"] == 0, float("-inf"))
        best = best_of_each(rewards, rs.num_rollouts_per_prompt, rs.top_n_rollouts)
        kept = columns_of(batch, TRAINED_COLUMNS).select_indices(best)
        with timers("train_policy"):
            self.policy.prepare_for_training()
            result = self.policy.train(kept, self.loss)
            self.policy.finish_training()
            self.generation.weights_changed()
        earned = statistics(batch["rewards"][best], batch["sample_mask"][best])
        self.consumed_samples += batch.size
        self.updates += count_updates([result])
        metrics |= {
            **prefixed("train_optim", update_metrics([result])),
            "train_optim/optimizer_steps": self.updates,
            "train_rollouts/kept_rewards": earned["mean"].item(),
            "progress/epoch": self.sampler.epoch,
            "progress/consumed_samples": self.consumed_samples,
        }
        samples = samples_of(batch, step, "train", self.config.exp_manager.samples_per_step)
        return StepResult(metrics, samples, idle_roles(policy=[result]))

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample responses to the validation prompts, as in ``validation``, and score them."""
        return validate_on_prompts(
            self.config, self.rollouts, self.generation, self.reward, self.held_out, step, timers
        )

    @property
    def trained_role(self) -> Policy:
        """The role that the run is about."""
        return self.policy

    def save_model(self, path: str) -> None:
        """Write the policy as a `.nemo` file."""
        self.policy.save_checkpoint(path)

    # Run state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, the sampler's position and a prefetched rollout."""
        return {
            "consumed_samples": self.consumed_samples,
            "updates": self.updates,
            "rollouts": self.rollouts.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """Roles whose weights and optimizer states a run state holds, by their folders there."""
        return {"policy": self.policy}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Inverse of `state_dict`, and the roles from their folders."""
        self.consumed_samples = state["consumed_samples"]
        self.updates = state["updates"]
        self.sampler.load_state_dict(state["sampler"])
        self.rollouts.load_state_dict(state["rollouts"])
        for name, role in self.roles.items():
            role.load_state(folder / name)
        self.generation.weights_changed()


def best_of_each(rewards: Tensor, rollouts_per_prompt: int, top_n: int) -> Tensor:
    """Rows of the ``top_n`` best responses to each prompt, int64 [B / rollouts_per_prompt * top_n].

    ``rewards``: float [B], responses to a prompt adjacent: the group of a response is given
    by their place, not by their tokens. Of equal rewards the earlier response is taken. Rows stand
    in the order of the rollout.
    """
    groups = rewards.view(-1, rollouts_per_prompt)
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :top_n]
    first = torch.arange(len(groups))[:, None] * rollouts_per_prompt
    return (order + first).sort(dim=1).values.flatten()
