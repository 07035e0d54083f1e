"""A rejection-sampling run: prompts and rewards in, the policy started, the trainer run."""

from aligner.algorithms.rollout.inputs import (
    generation_note,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.reward_source import load_reward
from aligner.algorithms.rs.trainer import RSTrainer
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import sampling_summary, total_steps, trained_policy
from aligner.config import RSRunConfig
from aligner.config.rules.checks import check_model_shares


def train_rs(config: RSRunConfig) -> None:
    """Run rejection sampling from start to end and print where everything is."""
    with Run.open(config) as run:
        config, rs = run.config, run.config.model.rs
        check_model_shares(config, run.world_size)
        prompts = load_prompts(run)
        columns = prompts.train.column_names
        reward = load_reward(config, run.engine, run.tokenizer, columns, run.closing)
        environments = load_environments(run, columns)
        prompts = of_dry_run(run, prompts)
        for attempt in run.attempts():
            with attempt:
                sampler = prompts.sampler(config)
                steps = total_steps(config.loop, sampler)
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
                attempt.fit(trainer, steps, summary)
