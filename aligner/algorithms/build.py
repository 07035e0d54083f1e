"""Assembling a PPO run from its configuration: data, roles, trainer."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console

from aligner.algorithms.assembly import (
    build_loop,
    check_log_dir,
    describe_model,
    finish,
    log_dir,
    notes_on,
    run_facts,
    total_steps,
)
from aligner.algorithms.engine import Clusters, open_engine, with_restarts
from aligner.algorithms.ppo import PPOTrainer, needs_reference
from aligner.algorithms.run_loop import Restoration
from aligner.algorithms.startup import check_lengths, startup_facts
from aligner.architecture import GPTArchitecture
from aligner.config import PromptSourceConfig, RunConfig, check_layout
from aligner.config.checks import check_batch_layout
from aligner.data.prompts import PromptDataset, PromptFormat
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.agreement import is_rank_zero
from aligner.models.generation.vllm import VllmGeneration
from aligner.models.policy.lm_policy import Policy
from aligner.models.reward.lm_reward import Reward
from aligner.models.value.lm_value import Value
from aligner.observe.startup import Restored, startup_report


def train_ppo(config: RunConfig) -> None:
    """Run PPO from start to end and say where everything is."""
    with ExitStack() as closing:
        engine = open_engine(config, log_dir(config), closing)
        console = Console(quiet=not is_rank_zero())
        check_log_dir(config)
        inputs = load_inputs(config, closing)
        started = time.monotonic()

        def attempt(number: int) -> None:
            with ExitStack() as workers:
                clusters = engine.clusters(workers)
                _run(config, inputs, clusters, console, workers, number > 0, started)

        with_restarts(engine, console, attempt)


@dataclass(frozen=True)
class RunInputs:
    """What a run reads before any model is built."""

    tokenizer: Tokenizer
    architecture: GPTArchitecture
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    reward: Reward


def load_inputs(config: RunConfig, closing: ExitStack) -> RunInputs:
    """Read and check them; ``closing`` ends the reward function."""
    tokenizer, architecture = describe_model(config.model)
    worlds = (config.trainer.world_size, config.value_world_size)
    for world in filter(None, worlds):
        check_layout(architecture, config.model.parallel, world)
    check_batch_layout(config, *(config.model.parallel.data_size(world) for world in worlds))
    train_prompts = load_prompts(config, config.data.train, tokenizer)
    val_prompts = (
        None
        if config.data.validation is None
        else load_prompts(config, config.data.validation, tokenizer)
    )
    for prompts in (train_prompts, val_prompts):
        if prompts is not None:
            check_lengths(config, architecture, prompts.max_length)
    reward = Reward.load(config.reward, tokenizer)
    closing.callback(reward.shutdown)
    reward.check_columns(train_prompts.column_names)
    return RunInputs(tokenizer, architecture, train_prompts, val_prompts, reward)


def _run(
    config: RunConfig,
    inputs: RunInputs,
    clusters: Clusters,
    console: Console,
    closing: ExitStack,
    is_restart: bool,
    started: float,
) -> None:
    """Build the roles and run on from the last state; ``closing`` ends what must not outlive it."""
    sampler = PromptSampler(
        len(inputs.train_prompts),
        config.model.ppo.num_rollout_samples // config.model.ppo.num_rollouts_per_prompt,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    steps = total_steps(config.trainer.ppo, sampler)
    policy, value = build_roles(config, inputs.tokenizer, clusters, steps)
    closing.callback(policy.shutdown)
    if value is not None:
        closing.callback(value.shutdown)
    generation = build_generation(config, inputs, clusters, policy)
    if generation is not None:
        closing.callback(generation.shutdown)
    trainer = PPOTrainer(
        config,
        policy,
        value,
        inputs.reward,
        inputs.train_prompts,
        inputs.val_prompts,
        sampler,
        inputs.tokenizer.pad_id,
        generation=generation,
        total_steps=steps,
    )
    layout = clusters.describe(config)
    loop = build_loop(
        config, config.trainer.ppo, trainer, layout, console, steps, is_restart, started
    )
    closing.callback(loop.metrics.close)
    closing.callback(loop.samples.close)
    restored = loop.restore()
    facts = startup_facts(
        config,
        inputs.architecture,
        clusters.policy.world_size(),
        inputs.train_prompts,
        steps=steps,
        with_reference=needs_reference(config),
        restored=None if restored is None else _restored(restored),
        notes=notes_on(
            restored,
            layout,
            dropped=inputs.train_prompts.dropped_too_long,
            what="training prompts",
            key="data.max_prompt_length",
        ),
    )
    console.print(startup_report(facts))
    ended = loop.run(None if restored is None else restored.step)
    estimator = config.trainer.ppo.advantage.estimator
    algorithm = "PPO" if estimator == "gae" else estimator
    finish(config, algorithm, ("policy", policy), loop, console, ended)


def load_prompts(
    config: RunConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> PromptDataset:
    """Read and tokenize one set of prompts."""
    data = config.data
    return PromptDataset.load(
        source.source,
        tokenizer,
        PromptFormat(
            prompt_column=data.prompt_column,
            ground_truth_column=data.ground_truth_column,
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
        run,
        backend=config.policy.backend,
        init_reference_model=needs_reference(config),
        max_optimizer_steps=policy_steps * (passes // config.model.global_batch_size),
    )
    if config.critic is None:
        return policy, None
    value = Value(
        clusters.value,
        config.critic,
        config.model,
        tokenizer,
        run,
        backend=config.policy.backend,
        max_optimizer_steps=steps * (passes // config.critic.global_batch_size),
    )
    return policy, value


def build_generation(
    config: RunConfig, inputs: RunInputs, clusters: Clusters, policy: Policy
) -> VllmGeneration | None:
    """The engines that draw for the policy; None where its own workers do."""
    if config.generation.backend == "megatron":
        return None
    longest = max(
        prompts.max_length for prompts in (inputs.train_prompts, inputs.val_prompts) if prompts
    )
    return VllmGeneration(
        clusters.generation,
        config,
        inputs.tokenizer,
        inputs.architecture,
        policy,
        longest + config.model.ppo.length_params.max_length,
    )


def _restored(restoration: Restoration) -> Restored:
    items = ["policy", "critic", "optimizers", "schedules", "data position", "KL coefficient"]
    if restoration.saved_layout is None:
        items.append("random states")
    return Restored(restoration.step, str(restoration.path), items)
