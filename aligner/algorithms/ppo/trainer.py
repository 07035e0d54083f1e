"""Proximal policy optimisation (Schulman et al., 2017) of a language model.

    prompts ─► 1 generate ─► 2 reward ─► 3 values ─► 4 log-probs ─► 5 reference log-probs
                                                                           │
         8 validate, save ◄─ 7 train critic, then policy, ppo_epochs × ◄─ 6 advantages

With a critic (`Value`), or without one: REINFORCE, RLOO, GRPO and their kin differ in how rewards
become advantages (`credit`) and in options of the loss, and leave out stage 3 and half of 7.

Everything passes in one rollout batch whose columns are those of `aligner.types`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.algorithms.ppo.build import (
    kl_in_reward,
    make_estimator,
    make_kl_controller,
    make_policy_loss,
    needs_reference,
    rows_scored_by_training,
    run_notes,
    start_roles,
    starts_at_sampler,
    summary_of,
)
from aligner.algorithms.ppo.credit import Credit
from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.algorithms.rollout.inputs import (
    generation_note,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.prefetch import Rollouts
from aligner.algorithms.rollout.reward_source import load_reward
from aligner.algorithms.rollout.rollout import (
    RolloutSource,
    fill_with_varied_groups,
    prefixed,
    samples_of,
    score,
)
from aligner.algorithms.rollout.validation import HeldOut, validate_on_prompts
from aligner.algorithms.run.length import total_steps
from aligner.algorithms.run.loop import StepResult
from aligner.algorithms.run.run import Run
from aligner.config import RunConfig
from aligner.data.dataset import PromptSampler
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.losses.corrections import second_moment_masks
from aligner.losses.value import PPOValueLoss
from aligner.models.handle import TRAINED_COLUMNS, RoleHandle
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.diagnostics import count_updates, gap_warnings, idle_roles, update_metrics
from aligner.observe.metric_names import describe
from aligner.observe.metrics import PhaseTimers
from aligner.rewards.interface import RewardInterface
from aligner.types import LossFunction

CRITIC_COLUMNS = (*TRAINED_COLUMNS, "values", "returns")
POLICY_COLUMNS = (*TRAINED_COLUMNS, "advantages", "generation_logprobs")
# Of which a run has those that its options ask for.
OPTIONAL_COLUMNS = ("ref_logprobs", "second_moment_mask", "kept_ids")


def train_ppo(config: RunConfig) -> None:
    """Run PPO from start to end and print where everything is."""
    with Run.open(config) as run:
        config = run.config
        prompts = load_prompts(run)
        columns = prompts.train.column_names
        reward = load_reward(config, run.engine, run.tokenizer, columns, run.closing)
        policy_loss, estimator = make_policy_loss(config), make_estimator(config)
        environments = load_environments(run, prompts)
        prompts = of_dry_run(run, prompts)
        for attempt in run.attempts():
            with attempt:
                sampler = prompts.sampler(config)
                steps = total_steps(config, sampler)
                policy, critic = start_roles(config, attempt, steps)
                engines = start_generation(config, attempt, policy, prompts.max_length)
                trainer = PPOTrainer(
                    config,
                    policy,
                    critic,
                    reward.start(attempt, critic),
                    prompts.train,
                    prompts.validation,
                    sampler,
                    pad_id=run.tokenizer.pad_id,
                    generation=engines,
                    total_steps=steps,
                    val_sets=prompts.sets,
                    rollout_source=environments,
                    policy_loss=policy_loss,
                    estimator=estimator,
                )
                attempt.closing.callback(trainer.rollouts.close)
                notes = [*prompts.notes(), *run_notes(config), *generation_note(engines)]
                summary = summary_of(
                    config, attempt, prompts.train, steps, frozen=reward.memory(), notes=notes
                )
                with attempt.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


class PPOTrainer:
    """The PPO algorithm over the handles; `RunLoop` drives it."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        value: Value | None,
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
        policy_loss: LossFunction,
        estimator: UserEstimator | None,
    ) -> None:
        """Set up; nothing runs yet.

        ``sampler`` draws ``num_rollout_samples / num_rollouts_per_prompt`` prompts a step.
        ``value``: the critic, where ``trainer.ppo.advantage.estimator`` asks for one.
        ``generation`` samples the responses; default ``policy`` itself. No rollout is begun for
        a step beyond ``total_steps`` (None: not known). ``val_sets``: further validation prompts.
        ``rollout_source``: of a run over conversations. ``policy_loss``, ``estimator``: of
        `make_policy_loss` and `make_estimator`.
        """
        self.config = config
        self.policy, self.value, self.reward = policy, value, reward
        self.train_prompts = train_prompts
        self.held_out = HeldOut(val_prompts, val_sets or {})
        self.sampler, self.pad_id = sampler, pad_id
        self.generation = generation or policy
        self.total_steps = total_steps
        self.rollouts = Rollouts(
            config, self.generation, train_prompts, sampler, pad_id, rollout_source
        )
        self.kl_controller = make_kl_controller(config.trainer.ppo)
        self.kl_in_reward = kl_in_reward(config)
        self.starts_at_sampler = starts_at_sampler(config)
        self.needs_reference = needs_reference(config)
        # Rows that need no pass for their log-probs: of a step that trains the policy, or not.
        self._scored_rows = {each: rows_scored_by_training(config, each) for each in (True, False)}
        self.credit = Credit(
            config.trainer.ppo,
            self.kl_in_reward,
            config.model.ppo.num_rollouts_per_prompt,
            config.model.ppo.length_params.max_length,
            estimator,
        )
        self.policy_loss = policy_loss
        critic = config.critic
        self.value_loss = PPOValueLoss(None if critic is None else critic.value_clip)
        self.consumed_samples = 0
        self.policy_updates = 0
        self.critic_updates = 0

    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """One PPO step: a rollout, then ``ppo_epochs`` passes of critic and policy over it."""
        ppo = self.config.model.ppo
        trains_policy = step > self.config.trainer.ppo.critic_warmup_steps
        is_untrained = self.policy_updates == 0

        # 1. and 2. Generate responses to the next prompts and score them.
        batch, metrics = self._scored_rollout(step, timers)
        # 3. Values of the states they pass through.
        if self.value is not None:
            with timers("values"):
                self.value.prepare_for_inference()
                batch["values"] = self.value.get_values(batch)["values"].cpu()
                self.value.finish_inference()
        # 4. and 5. Log-probs under the policy and its reference, where they are not known.
        scored_rows = self._scored_rows[trains_policy]
        with timers("logprobs"):
            self._add_logprobs(batch, scored_rows)
        on_policy_rows = 0 if self.starts_at_sampler else scored_rows
        with timers("reference_logprobs"):
            self._add_reference_logprobs(batch)
            self.policy.finish_inference()  # what it cached is free for roles on this device
        # 6. Rewards per token, advantages, returns.
        with timers("advantages"):
            found, kl = self.credit.assign(batch, self.kl_controller.value)
            metrics |= found
            if self.kl_in_reward and trains_policy:
                self.kl_controller.update(kl, batch.size)
        # 7. Train.
        critic_passes: list[dict[str, Any]] = []
        policy_passes: list[dict[str, Any]] = []
        for _ in range(ppo.ppo_epochs):
            if self.value is not None:
                with timers("train_critic"):
                    known = columns_of(batch, CRITIC_COLUMNS)
                    self.value.prepare_for_training()
                    critic_passes.append(self.value.train(known, self.value_loss))
                    self.value.finish_training()
            if trains_policy:
                with timers("train_policy"):
                    policy_passes += self._train_policy(batch, on_policy_rows)

        metrics |= self._update_metrics(policy_passes, critic_passes)
        samples = samples_of(batch, step, "train", self.config.exp_manager.samples_per_step)
        idle = idle_roles(policy=policy_passes, critic=critic_passes)
        return StepResult(metrics, samples, idle, self._gap_warnings(metrics, is_untrained))

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Sample responses to the validation prompts, as in ``validation``, and score them."""
        return validate_on_prompts(
            self.config, self.rollouts, self.generation, self.reward, self.held_out, step, timers
        )

    @property
    def is_out_of_data(self) -> bool:
        """True if ``max_epochs`` is reached before the steps that were reckoned.

        With dynamic sampling a step may take several rollouts, and nobody knows how many before.
        """
        return self.config.trainer.ppo.dynamic_sampling.enabled and self._prompts_left() == 0

    def _prompts_left(self) -> int:
        return self.sampler.left_in(self.config.trainer.ppo.max_epochs)

    # Stages -----------------------------------------------------------------------------------

    def _scored_rollout(
        self, step: int, timers: PhaseTimers
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """The step's rollout with its rewards; metrics of what the policy sampled first."""
        sampling = self.config.trainer.ppo.dynamic_sampling
        more = self.total_steps is None or step < self.total_steps
        seen: list[dict[str, float]] = []

        def sample_rollout(prompts: int | None = None) -> BatchedDataDict:
            with timers("generate"):
                # With dynamic sampling nobody knows yet how many rollouts a step takes.
                ahead = more and not sampling.enabled
                batch = self.rollouts.take(self.consumed_samples, more=ahead, prompts=prompts)
            self.consumed_samples += batch.size
            with timers("reward"):
                seen.append(score(self.reward, batch))
            self.credit.shape(batch)
            return batch

        if not sampling.enabled:
            batch = sample_rollout()
            return batch, prefixed("train_rollouts", seen[0])
        per_prompt = self.config.model.ppo.num_rollouts_per_prompt
        batch, sampled = fill_with_varied_groups(
            sample_rollout,
            prompts=self.config.model.ppo.num_rollout_samples // per_prompt,
            rollouts_per_prompt=per_prompt,
            max_rollouts=sampling.max_rollouts,
            prompts_left=self._prompts_left,
            pad_id=self.pad_id,
            credit=self.config.trainer.ppo.advantage.credit,
        )
        return batch, {
            **prefixed("train_rollouts", seen[0]),
            "train_rollouts/samples_drawn": sampled,
        }

    def _add_logprobs(self, batch: BatchedDataDict, scored_rows: int) -> None:
        """``prev_logprobs`` [B, S]; of the first ``scored_rows`` rows the sampler's stand in.

        Those rows are trained without the column, so the sampler's numbers reach the KL penalty at
        most, never the ratio; unless ``correction.old_logprobs`` wants them there.
        """
        batch["prev_logprobs"] = batch["generation_logprobs"].clone()
        if scored_rows < batch.size:
            self.policy.prepare_for_lp_inference()
            rest = batch.slice(scored_rows, batch.size)
            batch["prev_logprobs"][scored_rows:] = self.policy.get_logprobs(rest)["logprobs"].cpu()
        limit = self.config.model.ppo.correction.second_moment
        if limit is not None:
            rows = self.config.model.global_batch_size
            batch["second_moment_mask"] = second_moment_masks(batch, limit, rows)

    def _add_reference_logprobs(self, batch: BatchedDataDict) -> None:
        if self.needs_reference:
            self.policy.prepare_for_lp_inference()
            result = self.policy.get_reference_policy_logprobs(batch)
            batch["ref_logprobs"] = result["reference_logprobs"].cpu()

    def _train_policy(self, batch: BatchedDataDict, on_policy_rows: int) -> list[dict[str, Any]]:
        """One pass: first the rows that need no old log-probs, then the others."""
        columns = [*POLICY_COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in batch)]
        known = columns_of(batch, columns)
        with_previous = columns_of(batch, [*columns, "prev_logprobs"])
        parts = [
            known.slice(0, on_policy_rows),
            with_previous.slice(on_policy_rows, batch.size),
        ]
        self.policy.prepare_for_training()
        results = [self.policy.train(part, self.policy_loss) for part in parts if part.size]
        self.policy.finish_training()
        self.generation.weights_changed()
        return results

    def _update_metrics(
        self, policy_passes: list[dict[str, Any]], critic_passes: list[dict[str, Any]]
    ) -> dict[str, float]:
        self.critic_updates += count_updates(critic_passes)
        self.policy_updates += count_updates(policy_passes)
        metrics: dict[str, float] = {}
        if critic_passes:
            metrics |= prefixed("critic", update_metrics(critic_passes))
            metrics["critic/optimizer_steps"] = self.critic_updates
        if policy_passes:
            policy = update_metrics(policy_passes)
            for name, value in policy.items():
                known = (f"{group}/{name}" for group in ("sampler", "train_optim"))
                metrics[next(filter(describe, known), f"custom/{name}")] = value
        metrics["train_optim/optimizer_steps"] = self.policy_updates
        metrics["progress/epoch"] = self.sampler.epoch
        metrics["progress/consumed_samples"] = self.consumed_samples
        return metrics

    def _gap_warnings(self, metrics: dict[str, float], was_untrained: bool) -> tuple[str, ...]:
        """Warnings of a gap between sampler and trainer, where no update stands between them.

        ``was_untrained``: the policy was, when the step began. Where the sampler stands for the old
        policy the gap is measured by the updates themselves, of which only the first is free of it.
        """
        if not was_untrained or (self.starts_at_sampler and self.policy_updates > 1):
            return ()
        return gap_warnings(metrics, self.config.trainer.precision)

    @property
    def trained_role(self) -> Policy:
        """The role that the run is about."""
        return self.policy

    def save_model(self, path: str) -> None:
        """Write the policy as a `.nemo` file."""
        self.policy.save_checkpoint(path)

    # Run state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, the sampler's position, a prefetched rollout and the KL controller."""
        return {
            "consumed_samples": self.consumed_samples,
            "policy_updates": self.policy_updates,
            "critic_updates": self.critic_updates,
            "rollouts": self.rollouts.state_dict(),
            "sampler": self.sampler.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
        }

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """Roles whose weights and optimizer states a run state holds, by their folders there."""
        critic = {} if self.value is None else {"value": self.value}
        return {"policy": self.policy, **critic}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Inverse of `state_dict`, and the roles from their folders."""
        self.consumed_samples = state["consumed_samples"]
        self.policy_updates = state["policy_updates"]
        self.critic_updates = state["critic_updates"]
        self.sampler.load_state_dict(state["sampler"])
        self.rollouts.load_state_dict(state["rollouts"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        for name, role in self.roles.items():
            role.load_state(folder / name)
        self.generation.weights_changed()
