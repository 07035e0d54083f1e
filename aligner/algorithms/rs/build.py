"""Assembling a rejection-sampling run from its configuration."""

from aligner.algorithms.ppo.build import (
    RunInputs,
    build_generation,
    generation_note,
    load_inputs,
    prompt_notes,
    prompt_sampler,
)
from aligner.algorithms.rs.trainer import RSTrainer
from aligner.algorithms.run.assembly import (
    Assembled,
    Attempt,
    launch_run,
    run_facts,
    run_to_the_end,
    total_steps,
)
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.startup import startup_facts, trained_policy
from aligner.config import RSRunConfig
from aligner.models.policy.lm_policy import Policy


@may_be_dry
def train_rs(config: RSRunConfig) -> None:
    """Run rejection sampling from start to end and print where everything is."""
    launch_run(
        config,
        lambda engine, closing: load_inputs(config, engine, closing),
        lambda inputs, attempt: _run(config, inputs, attempt),
    )


def _run(config: RSRunConfig, inputs: RunInputs, attempt: Attempt) -> None:
    """Build the policy and run on from the last state."""
    clusters, closing, rs = attempt.clusters, attempt.closing, config.model.rs
    sampler = prompt_sampler(config, inputs)
    steps = total_steps(config.loop, sampler)
    kept = sampler.batch_size * rs.top_n_rollouts
    policy = Policy(
        clusters.policy,
        config.model,
        inputs.tokenizer,
        run=run_facts(config, config.loop),
        backend=config.policy.backend,
        init_reference_model=False,
        max_optimizer_steps=steps * (kept // config.model.global_batch_size),
    )
    closing.callback(policy.shutdown)
    generation = build_generation(config, inputs, attempt, policy)
    trainer = RSTrainer(
        config,
        policy,
        inputs.reward.start(attempt),
        inputs.train_prompts,
        inputs.val_prompts,
        sampler,
        pad_id=inputs.tokenizer.pad_id,
        generation=generation,
        total_steps=steps,
        val_sets=inputs.val_sets,
    )
    run = Assembled(
        trainer,
        config.loop,
        steps,
        layout=clusters.describe(config),
        trained=("policy", policy),
        restores=["policy", "optimizer", "schedule", "data position"],
        facts=lambda device, restored, notes: startup_facts(
            config,
            inputs.architecture,
            clusters.policy.world_size(),
            inputs.train_prompts,
            device,
            steps=steps,
            trained=[trained_policy(config)],
            frozen=inputs.reward.memory(),
            restored=restored,
            notes=notes,
        ),
        notes=[
            f"of the samples of a step the best {rs.top_n_rollouts} of every "
            f"{rs.num_rollouts_per_prompt} are learned: {kept}",
            *prompt_notes(inputs),
            *generation_note(generation),
        ],
    )
    run_to_the_end(config, run, attempt)
