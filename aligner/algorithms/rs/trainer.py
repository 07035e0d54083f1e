"""Rejection sampling (best-of-n fine-tuning): train on the best of the policy's own responses.

prompts ─► 1 generate n responses each ─► 2 reward ─► 3 select the best of each prompt
                                                          │
                    5 validate, save ◄── 4 train on them, maximum likelihood
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.algorithms.rollout.rollout import prefixed, samples_of, score
from aligner.algorithms.rollout.trainer import SamplingInputs, SamplingTrainer
from aligner.algorithms.run.loop import StepResult
from aligner.algorithms.run.run import Run
from aligner.config import RSRunConfig
from aligner.distributed.batched_data_dict import columns_of
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.handle import TRAINED_COLUMNS
from aligner.observe.diagnostics import count_updates, idle_roles, statistics, update_metrics
from aligner.observe.metrics import PhaseTimers


def train_rs(config: RSRunConfig) -> None:
    """Train a policy by rejection sampling, and print the paths of the run's files."""
    with Run.open(config) as run:
        config, rs = run.config, run.config.model.rs
        inputs = SamplingInputs.load(run)
        for attempt in run.attempts():
            with attempt as workers:
                sampler, steps = inputs.sampler_and_steps()
                # The optimizer's schedule counts updates on selected samples.
                selected = sampler.batch_size * rs.top_n_rollouts
                updates = steps * (selected // config.model.global_batch_size)
                policy = workers.start_policy(updates)
                trainer = inputs.start(RSTrainer, workers, policy, sampler, steps)
                note = (
                    f"A step trains on the best {rs.top_n_rollouts} of every "
                    f"{rs.num_rollouts_per_prompt} samples: {selected}"
                )
                restores = ["optimizer", "schedule", "data position"]
                summary = inputs.summary(workers, trainer, steps, restores=restores, notes=[note])
                with workers.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


@dataclass(kw_only=True, eq=False)
class RSTrainer(SamplingTrainer):
    """Trainer of rejection sampling, called by `RunLoop`."""

    config: RSRunConfig
    updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss = NegativeLogLikelihoodLoss()

    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample one rollout, and train once on the best responses to each prompt."""
        rs = self.config.model.rs
        with timers("generate"):
            batch = self.rollouts.take(self.consumed_samples, more=self.has_next(step))
        with timers("reward"):
            metrics = prefixed("train_rollouts", score(self.reward, batch))
        # Select the best responses of each prompt, but no excluded samples.
        rewards = batch["rewards"].masked_fill(batch["sample_mask"] == 0, float("-inf"))
        best = best_of_each(rewards, rs.num_rollouts_per_prompt, rs.top_n_rollouts)
        best_rewards = statistics(batch["rewards"][best], batch["sample_mask"][best])
        # Train once on the best responses.
        with timers("train_policy"):
            self.policy.prepare_for_training()
            trained_batch = columns_of(batch, TRAINED_COLUMNS).select_indices(best)
            result = self.policy.train(trained_batch, self.loss)
            self.policy.finish_training()
            self.generation.weights_changed()
        self.consumed_samples += batch.size
        self.updates += count_updates([result])
        metrics |= {
            **prefixed("train_optim", update_metrics([result])),
            "train_optim/optimizer_steps": self.updates,
            "train_rollouts/kept_rewards": best_rewards["mean"].item(),
            "progress/epoch": self.sampler.epoch,
            "progress/consumed_samples": self.consumed_samples,
        }
        samples = samples_of(batch, step, "train", self.config.exp_manager.samples_per_step)
        return StepResult(metrics, samples, idle_roles(policy=[result]))


def best_of_each(rewards: Tensor, rollouts_per_prompt: int, top_n: int) -> Tensor:
    """Return the row indices of the ``top_n`` best responses to each prompt, ascending.

    ``rewards``: float [B], where ``rollouts_per_prompt`` adjacent rows are responses to one prompt.
    Of equal rewards, the earlier rows are selected. Returns int64 [prompts * top_n].
    """
    groups = rewards.view(-1, rollouts_per_prompt)
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :top_n]
    first = torch.arange(len(groups))[:, None] * rollouts_per_prompt
    return (order + first).sort(dim=1).values.flatten()
