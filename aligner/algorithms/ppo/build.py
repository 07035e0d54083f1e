"""A PPO run: prompts and rewards in, roles started, the trainer run to its end."""

from aligner.algorithms.ppo.trainer import (
    PPOTrainer,
    make_estimator,
    make_policy_loss,
    needs_reference,
)
from aligner.algorithms.rollout.inputs import (
    generation_note,
    load_environments,
    load_prompts,
    of_dry_run,
    start_generation,
)
from aligner.algorithms.rollout.reward_source import load_reward
from aligner.algorithms.run.engine import Clusters, Workers, run_settings
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import sampling_summary, total_steps, trained_policy
from aligner.architecture import GPTArchitecture
from aligner.config import RunConfig, check_layout
from aligner.config.rules.checks import check_batch_layout
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.startup import TrainedRole


def train_ppo(config: RunConfig) -> None:
    """Run PPO from start to end and print where everything is."""
    with Run.open(config) as run:
        config = run.config
        check_roles(config, run.architecture, run.engine.worlds)
        prompts = load_prompts(run)
        columns = prompts.train.column_names
        reward = load_reward(config, run.engine, run.tokenizer, columns, run.closing)
        policy_loss, estimator = make_policy_loss(config), make_estimator(config)
        environments = load_environments(run, columns)
        prompts = of_dry_run(run, prompts)
        for attempt in run.attempts():
            with attempt:
                sampler = prompts.sampler(config)
                steps = total_steps(config.loop, sampler)
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
                summary = sampling_summary(
                    config,
                    attempt,
                    prompts.train,
                    steps=steps,
                    trained=[*_trained_critic(config, attempt.clusters), trained_policy(config)],
                    passes=config.model.ppo.ppo_epochs,
                    with_reference=needs_reference(config),
                    frozen=reward.memory(),
                    restores=_restores(config),
                    notes=[*prompts.notes(), *_dynamic_note(config), *generation_note(engines)],
                )
                attempt.fit(trainer, steps, summary)


def check_roles(config: RunConfig, architecture: GPTArchitecture, worlds: tuple[int, int]) -> None:
    """Refuse a layout of the critic, or batches of either role, that its workers cannot share.

    ``worlds``: workers of the policy and of the critic (0: there is none).
    """
    policy_world, value_world = worlds
    if value_world:
        section = "model" if config.value_parallel == config.model.parallel else "critic"
        check_layout(architecture, config.value_parallel, value_world, section)
    policy_size = config.model.parallel.data_size(policy_world)
    check_batch_layout(config, policy_size, config.value_parallel.data_size(value_world))


def start_roles(config: RunConfig, workers: Workers, steps: int) -> tuple[Policy, Value | None]:
    """Policy and critic on their clusters; the reference policy where a KL term asks for it.

    None as the critic where the advantages come without one.
    """
    ppo = config.model.ppo
    samples = ppo.ppo_epochs * ppo.num_rollout_samples
    policy_steps = max(0, steps - config.trainer.ppo.critic_warmup_steps)
    policy = workers.start_policy(
        policy_steps * (samples // config.model.global_batch_size),
        with_reference=needs_reference(config),
    )
    if config.critic is None:
        return policy, None
    value = Value(
        workers.clusters.value,
        config.critic,
        workers.tokenizer,
        model=config.model,
        run=run_settings(config),
        backend=config.policy.backend,
        max_optimizer_steps=steps * (samples // config.critic.global_batch_size),
    )
    return policy, workers.own(value)


def _restores(config: RunConfig) -> list[str]:
    critic = [] if config.critic is None else ["critic"]
    return ["policy", *critic, "optimizers", "schedules", "data position", "KL coefficient"]


def _dynamic_note(config: RunConfig) -> list[str]:
    if not config.trainer.ppo.dynamic_sampling.enabled:
        return []
    return [
        "dynamic sampling: the run ends when trainer.ppo.max_epochs passes over the prompts are "
        "made, which may be before the steps above"
    ]


def _trained_critic(config: RunConfig, clusters: Clusters) -> list[TrainedRole]:
    critic, layout = config.critic, config.value_parallel
    if critic is None:
        return []
    return [
        TrainedRole(
            "critic",
            critic.global_batch_size,
            critic.micro_batch_size,
            layout.data_size(clusters.value.world_size()),
            layout.model_parallel_size,
        )
    ]
