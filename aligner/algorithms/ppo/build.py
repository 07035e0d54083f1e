"""Assembling a PPO run from its configuration: data, roles, trainer."""

from contextlib import ExitStack
from dataclasses import dataclass

from aligner.algorithms.ppo.trainer import (
    PPOTrainer,
    make_estimator,
    make_policy_loss,
    needs_reference,
)
from aligner.algorithms.rollout.reward_source import RewardSource, load_reward
from aligner.algorithms.run.assembly import (
    Assembled,
    Attempt,
    describe_model,
    dropped_note,
    launch_run,
    run_facts,
    run_to_the_end,
    shared_note,
    total_steps,
)
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.engine import Clusters, Engine
from aligner.algorithms.run.longest import longest_set
from aligner.algorithms.run.startup import (
    check_lengths,
    check_validation_lengths,
    startup_facts,
    trained_policy,
)
from aligner.architecture import GPTArchitecture
from aligner.config import PromptSourceConfig, RunConfig, SamplingRunConfig, check_layout
from aligner.config.rules.checks import check_batch_layout, check_model_shares
from aligner.data.prompts import PromptDataset, PromptFormat
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.generation.vllm.generation import VllmGeneration
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.observe.startup import TrainedRole


@may_be_dry
def train_ppo(config: RunConfig) -> None:
    """Run PPO from start to end and print where everything is."""
    launch_run(
        config,
        lambda engine, closing: load_inputs(config, engine, closing),
        lambda inputs, attempt: _run(config, inputs, attempt),
    )


@dataclass(frozen=True)
class RunInputs:
    """Inputs that a run reads before any model is built."""

    tokenizer: Tokenizer
    architecture: GPTArchitecture
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    reward: RewardSource
    val_sets: dict[str, PromptDataset]  # further ones, by name

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of all sets."""
        sets = [self.train_prompts, self.val_prompts, *self.val_sets.values()]
        return max(prompts.max_length for prompts in sets if prompts)


def load_inputs(config: SamplingRunConfig, engine: Engine, closing: ExitStack) -> RunInputs:
    """Read and check them; ``closing`` ends the reward function."""
    tokenizer, architecture = describe_model(config.model)
    policy_world, value_world = engine.worlds
    check_layout(architecture, config.model.parallel, policy_world)
    if value_world:
        section = "model" if config.value_parallel == config.model.parallel else "critic"
        check_layout(architecture, config.value_parallel, value_world, section)
    if isinstance(config, RunConfig):
        sizes = (
            config.model.parallel.data_size(policy_world),
            config.value_parallel.data_size(value_world),
        )
        check_batch_layout(config, *sizes)
    else:
        check_model_shares(config, engine.worlds[0])
    train_prompts = load_prompts(config, config.data.train, tokenizer)
    val_prompts = (
        None
        if config.data.validation is None
        else load_prompts(config, config.data.validation, tokenizer)
    )
    val_sets = {
        name: load_prompts(config, source, tokenizer)
        for name, source in config.validation.sets.items()
    }
    for prompts in (train_prompts, val_prompts, *val_sets.values()):
        if prompts is not None:
            check_lengths(config, architecture, prompts.max_length)
    check_validation_lengths(config, architecture, [val_prompts, *val_sets.values()])
    reward = load_reward(config, engine, tokenizer, train_prompts.column_names, closing)
    if isinstance(config, RunConfig):  # what is the user's own is refused here, not later
        make_policy_loss(config)
        make_estimator(config)
    if config.dry_run:
        train_prompts = longest_set(config, train_prompts, tokenizer, architecture)
        val_prompts, val_sets = None, {}
    return RunInputs(tokenizer, architecture, train_prompts, val_prompts, reward, val_sets)


def _run(config: RunConfig, inputs: RunInputs, attempt: Attempt) -> None:
    """Build the roles and run on from the last state."""
    clusters, closing = attempt.clusters, attempt.closing
    sampler = prompt_sampler(config, inputs)
    steps = total_steps(config.trainer.ppo, sampler)
    policy, value = build_roles(config, inputs.tokenizer, clusters, steps)
    closing.callback(policy.shutdown)
    if value is not None:
        closing.callback(value.shutdown)
    generation = build_generation(config, inputs, attempt, policy)
    trainer = PPOTrainer(
        config,
        policy,
        value,
        inputs.reward.start(attempt, value),
        inputs.train_prompts,
        inputs.val_prompts,
        sampler,
        pad_id=inputs.tokenizer.pad_id,
        generation=generation,
        total_steps=steps,
        val_sets=inputs.val_sets,
    )
    critic = [] if value is None else ["critic"]
    run = Assembled(
        trainer,
        config.trainer.ppo,
        steps,
        layout=clusters.describe(config),
        trained=("policy", policy),
        restores=["policy", *critic, "optimizers", "schedules", "data position", "KL coefficient"],
        facts=lambda device, restored, notes: startup_facts(
            config,
            inputs.architecture,
            clusters.policy.world_size(),
            inputs.train_prompts,
            device,
            steps=steps,
            trained=[*_trained_critic(config, clusters), trained_policy(config)],
            passes=config.model.ppo.ppo_epochs,
            with_reference=needs_reference(config),
            frozen=inputs.reward.memory(),
            restored=restored,
            notes=notes,
        ),
        notes=[
            *prompt_notes(inputs),
            *_dynamic_note(config),
            *generation_note(generation),
        ],
    )
    run_to_the_end(config, run, attempt)


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


def load_prompts(
    config: SamplingRunConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> PromptDataset:
    """Read and tokenize one set of prompts."""
    data = config.data
    return PromptDataset.load(
        source.source,
        tokenizer,
        PromptFormat(
            prompt_column=data.prompt_column,
            ground_truth_column=data.ground_truth_column,
            tools_column=data.tools_column,
            chat=data.chat,
            system_prompt=data.system_prompt,
            add_bos=data.add_bos,
            max_prompt_length=data.max_prompt_length,
        ),
        arguments=source.arguments,
        limit=source.limit,
    )


def build_roles(
    config: RunConfig, tokenizer: Tokenizer, clusters: Clusters, steps: int
) -> tuple[Policy, Value | None]:
    """Policy and critic on their clusters; the reference policy where a KL term asks for it.

    None as the critic where the advantages come without one.
    """
    ppo = config.model.ppo
    run = run_facts(config, config.trainer.ppo)
    passes = ppo.ppo_epochs * ppo.num_rollout_samples
    policy_steps = max(0, steps - config.trainer.ppo.critic_warmup_steps)
    policy = Policy(
        clusters.policy,
        config.model,
        tokenizer,
        run=run,
        backend=config.policy.backend,
        init_reference_model=needs_reference(config),
        max_optimizer_steps=policy_steps * (passes // config.model.global_batch_size),
    )
    if config.critic is None:
        return policy, None
    value = Value(
        clusters.value,
        config.critic,
        tokenizer,
        model=config.model,
        run=run,
        backend=config.policy.backend,
        max_optimizer_steps=steps * (passes // config.critic.global_batch_size),
    )
    return policy, value


def prompt_sampler(config: SamplingRunConfig, inputs: RunInputs) -> PromptSampler:
    """Sampler of the training prompts of each step."""
    rollout = config.model.rollout
    return PromptSampler(
        len(inputs.train_prompts),
        rollout.num_rollout_samples // rollout.num_rollouts_per_prompt,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )


def build_generation(
    config: SamplingRunConfig, inputs: RunInputs, attempt: Attempt, policy: Policy
) -> VllmGeneration | None:
    """The engines that draw for the policy; None where its own workers do.

    They are shut down at the end of ``attempt``.
    """
    if config.generation.backend == "megatron":
        return None
    generation = VllmGeneration(
        attempt.clusters.generation,
        config,
        inputs.tokenizer,
        inputs.architecture,
        policy,
        inputs.longest_prompt
        + max(config.model.rollout.length_params.max_length, config.validation.max_length or 0),
    )
    attempt.closing.callback(generation.shutdown)
    return generation


def prompt_notes(inputs: RunInputs) -> list[str]:
    """Prompts that were dropped, or are in both sets, for the start-up report."""
    train = inputs.train_prompts
    return [
        *dropped_note(train.dropped_too_long, "training prompts", "data.max_prompt_length"),
        *shared_note(train, inputs.val_prompts),
    ]


def generation_note(generation: VllmGeneration | None) -> list[str]:
    """Device settings of the engines, for the start-up report."""
    return [] if generation is None else [generation.in_words()]
