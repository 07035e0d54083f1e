"""Proximal policy optimisation (Schulman et al., 2017) of a language model.

    prompts ─► 1 generate ─► 2 reward ─► 3 values ─► 4 log-probs ─► 5 reference log-probs
                                                                           │
         8 validate, save ◄─ 7 train critic, then policy, ppo_epochs × ◄─ 6 advantages

REINFORCE, RLOO, GRPO and related algorithms have no critic (`Value`), so they skip stage 3 and do
not train a critic in stage 7. They differ in stage 6 (`credit`) and in options of the loss.

All stages read and extend one rollout ``batch``, whose columns are described in `aligner.types`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from aligner.algorithms.ppo.build import (
    kl_in_reward,
    make_estimator,
    make_policy_loss,
    needs_reference,
    rows_scored_by_training,
    run_notes,
    start_roles,
)
from aligner.algorithms.ppo.credit import Credit, KLController
from aligner.algorithms.ppo.dynamic_sampling import fill_with_varied_groups
from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.algorithms.rollout.rollout import prefixed, samples_of, score
from aligner.algorithms.rollout.trainer import SamplingInputs, SamplingTrainer
from aligner.algorithms.run.loop import StepResult
from aligner.algorithms.run.run import Run
from aligner.config import RunConfig
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.losses.corrections import second_moment_masks
from aligner.losses.value import PPOValueLoss
from aligner.models.handle import TRAINED_COLUMNS
from aligner.observe.diagnostics import count_updates, gap_warnings, idle_roles, update_metrics
from aligner.observe.metrics import PhaseTimers, describe
from aligner.types import LossFunction

CRITIC_COLUMNS = (*TRAINED_COLUMNS, "values", "returns")
POLICY_COLUMNS = (*TRAINED_COLUMNS, "advantages", "generation_logprobs")
# Columns that some options add to the batch.
OPTIONAL_COLUMNS = ("ref_logprobs", "second_moment_mask", "kept_ids")


def train_ppo(config: RunConfig) -> None:
    """Train a policy with PPO, and print the paths of the run's files."""
    with Run.open(config) as run:
        config = run.config
        options = {"policy_loss": make_policy_loss(config), "estimator": make_estimator(config)}
        inputs = SamplingInputs.load(run)
        for attempt in run.attempts():
            with attempt as workers:
                sampler, steps = inputs.sampler_and_steps()
                policy, critic = start_roles(config, workers, steps)
                trainer = inputs.start(
                    PPOTrainer, workers, policy, sampler, steps, value=critic, **options
                )
                summary = inputs.summary(
                    workers,
                    trainer,
                    steps,
                    passes=config.model.ppo.ppo_epochs,
                    with_reference=trainer.needs_reference,
                    restores=["optimizers", "schedules", "data position", "KL coefficient"],
                    notes=run_notes(config),
                )
                with workers.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


@dataclass(kw_only=True, eq=False)
class PPOTrainer(SamplingTrainer):
    """Trainer of PPO, called by `RunLoop`."""

    config: RunConfig
    policy_loss: LossFunction
    estimator: UserEstimator | None
    policy_updates: int = field(default=0, init=False)
    critic_updates: int = field(default=0, init=False)

    counters: ClassVar[tuple[str, ...]] = ("consumed_samples", "policy_updates", "critic_updates")

    def __post_init__(self) -> None:
        super().__post_init__()
        config, ppo = self.config, self.config.trainer.ppo
        controller, weight = ppo.kl_controller, ppo.initial_policy_kl_penalty
        self.kl_controller = KLController(weight)
        if controller.mode == "adaptive":
            self.kl_controller = KLController(weight, controller.target, controller.horizon)
        self.kl_in_reward, self.needs_reference = kl_in_reward(config), needs_reference(config)
        self.starts_at_sampler = config.model.ppo.correction.old_logprobs == "sampler"
        # Numbers of rows without a separate pass for log-probs, in critic warm-up and after it.
        self._scored_rows = [rows_scored_by_training(config, trains) for trains in (False, True)]
        model = config.model.ppo
        per_prompt, longest = model.num_rollouts_per_prompt, model.length_params.max_length
        self.credit = Credit(ppo, self.kl_in_reward, per_prompt, longest, self.estimator)
        self.value_loss = PPOValueLoss(None if config.critic is None else config.critic.value_clip)

    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """Execute one step: a rollout, then ``ppo_epochs`` passes of critic and policy over it."""
        ppo = self.config.model.ppo
        trains_policy = step > self.config.trainer.ppo.critic_warmup_steps
        is_untrained = self.policy_updates == 0

        # 1. and 2. Generate responses to the next prompts and score them.
        batch, metrics = self._scored_rollout(step, timers)
        # 3. Values of the states.
        if self.value is not None:
            with timers("values"):
                self.value.prepare_for_inference()
                batch["values"] = self.value.get_values(batch)["values"].cpu()
                self.value.finish_inference()
        # 4. and 5. Log-probs of the policy, unless already known, and of the reference policy.
        scored_rows = self._scored_rows[trains_policy]
        with timers("logprobs"):
            self._add_logprobs(batch, scored_rows)
        on_policy_rows = 0 if self.starts_at_sampler else scored_rows
        with timers("reference_logprobs"):
            if self.needs_reference:
                self.policy.prepare_for_lp_inference()
                result = self.policy.get_reference_policy_logprobs(batch)
                batch["ref_logprobs"] = result["reference_logprobs"].cpu()
            self.policy.finish_inference()  # frees caches for roles on the same device
        # 6. Rewards per token, advantages, returns.
        with timers("advantages"):
            credit_metrics, kl = self.credit.assign(batch, self.kl_controller.value)
            metrics |= credit_metrics
            if self.kl_in_reward and trains_policy:
                self.kl_controller.update(kl, batch.size)
        # 7. Train.
        critic_passes: list[dict[str, Any]] = []
        policy_passes: list[dict[str, Any]] = []
        for _ in range(ppo.ppo_epochs):
            if self.value is not None:
                with timers("train_critic"):
                    self.value.prepare_for_training()
                    columns = columns_of(batch, CRITIC_COLUMNS)
                    critic_passes.append(self.value.train(columns, self.value_loss))
                    self.value.finish_training()
            if trains_policy:
                with timers("train_policy"):
                    policy_passes += self._train_policy(batch, on_policy_rows)

        metrics |= self._update_metrics(policy_passes, critic_passes)
        samples = samples_of(batch, step, "train", self.config.exp_manager.samples_per_step)
        idle = idle_roles(policy=policy_passes, critic=critic_passes)
        # Before the first update, sampler and trainer have the same weights, so their log-probs
        # must agree. With ``starts_at_sampler``, the gap is measured in every update, so the check
        # is only valid if the step made a single update.
        warnings: tuple[str, ...] = ()
        if is_untrained and not (self.starts_at_sampler and self.policy_updates > 1):
            warnings = gap_warnings(metrics, self.config.trainer.precision)
        return StepResult(metrics, samples, idle, warnings)

    @property
    def is_out_of_data(self) -> bool:
        """Whether dynamic sampling reached ``max_epochs`` before the last scheduled step."""
        return self.config.trainer.ppo.dynamic_sampling.enabled and self._prompts_left() == 0

    def _prompts_left(self) -> int:
        return self.sampler.left_in(self.config.trainer.ppo.max_epochs)

    def _scored_rollout(
        self, step: int, timers: PhaseTimers
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Return the scored rollout, and metrics from before dynamic sampling replaces groups."""
        ppo, model = self.config.trainer.ppo, self.config.model.ppo
        sampling, score_metrics = ppo.dynamic_sampling, list[dict[str, float]]()

        def sample_rollout(prompts: int | None = None) -> BatchedDataDict:
            with timers("generate"):
                # With dynamic sampling the number of prompts of the next rollout is unknown.
                ahead = self.has_next(step) and not sampling.enabled
                batch = self.rollouts.take(self.consumed_samples, more=ahead, prompts=prompts)
            self.consumed_samples += batch.size
            with timers("reward"):
                score_metrics.append(score(self.reward, batch))
            self.credit.shape(batch)
            return batch

        if not sampling.enabled:
            batch = sample_rollout()
            return batch, prefixed("train_rollouts", score_metrics[0])
        # Sample until enough prompts have responses of different rewards.
        per_prompt = model.num_rollouts_per_prompt
        batch, sampled = fill_with_varied_groups(
            sample_rollout,
            prompts=model.num_rollout_samples // per_prompt,
            rollouts_per_prompt=per_prompt,
            max_rollouts=sampling.max_rollouts,
            prompts_left=self._prompts_left,
            pad_id=self.pad_id,
            credit=ppo.advantage.credit,
        )
        return batch, prefixed("train_rollouts", {**score_metrics[0], "samples_drawn": sampled})

    def _add_logprobs(self, batch: BatchedDataDict, scored_rows: int) -> None:
        """Add ``prev_logprobs`` float32 [B, S], and the mask of M2PO if it is configured.

        The first ``scored_rows`` rows get the sampler's log-probs. The policy computes the others.
        """
        batch["prev_logprobs"] = batch["generation_logprobs"].clone()
        if scored_rows < batch.size:
            self.policy.prepare_for_lp_inference()
            unscored = batch.slice(scored_rows, batch.size)
            logprobs = self.policy.get_logprobs(unscored)["logprobs"].cpu()
            batch["prev_logprobs"][scored_rows:] = logprobs
        limit = self.config.model.ppo.correction.second_moment
        if limit is not None:
            rows = self.config.model.global_batch_size
            batch["second_moment_mask"] = second_moment_masks(batch, limit, rows)

    def _train_policy(self, batch: BatchedDataDict, on_policy_rows: int) -> list[dict[str, Any]]:
        """Train the policy on all rows. The first ``on_policy_rows`` rows need no old log-probs."""
        columns = [*POLICY_COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in batch)]
        parts = [
            columns_of(batch, columns).slice(0, on_policy_rows),
            columns_of(batch, [*columns, "prev_logprobs"]).slice(on_policy_rows, batch.size),
        ]
        self.policy.prepare_for_training()
        results = [self.policy.train(part, self.policy_loss) for part in parts if part.size]
        self.policy.finish_training()
        self.generation.weights_changed()
        return results

    def _update_metrics(
        self, policy_passes: list[dict[str, Any]], critic_passes: list[dict[str, Any]]
    ) -> dict[str, float]:
        """Count the updates of a step, and return metrics of the updates and the progress."""
        self.critic_updates += count_updates(critic_passes)
        self.policy_updates += count_updates(policy_passes)
        metrics: dict[str, float] = {}
        if critic_passes:
            passes = {**update_metrics(critic_passes), "optimizer_steps": self.critic_updates}
            metrics |= prefixed("critic", passes)
        # Metrics that ``metric_names.md`` does not list come from a user's loss.
        if policy_passes:
            for name, value in update_metrics(policy_passes).items():
                names = (f"{group}/{name}" for group in ("sampler", "train_optim"))
                metrics[next(filter(describe, names), f"custom/{name}")] = value
        return metrics | {
            "train_optim/optimizer_steps": self.policy_updates,
            "progress/epoch": self.sampler.epoch,
            "progress/consumed_samples": self.consumed_samples,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return counters, data position, the next rollout, if sampled ahead, and β."""
        return {**super().state_dict(), "kl_controller": self.kl_controller.state_dict()}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore ``state``, a result of `state_dict`, and load the models from ``folder``."""
        super().load(state, folder)
        self.kl_controller.load_state_dict(state["kl_controller"])
