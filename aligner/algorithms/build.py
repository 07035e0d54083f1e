"""Assembling a run from its configuration: data, roles, trainer, loggers."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from aligner.algorithms.engine import Clusters, open_engine, with_restarts
from aligner.algorithms.ppo import PPOTrainer, needs_reference
from aligner.algorithms.run_loop import Restoration, RunLoop, Schedule
from aligner.algorithms.startup import check_lengths, startup_facts
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state import RunStateStore
from aligner.config import PromptSourceConfig, RunConfig, check_layout
from aligner.config.checks import check_batch_layout
from aligner.data.prompts import PromptDataset, PromptFormat
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.distributed import accelerator
from aligner.distributed.agreement import gather_objects, is_rank_zero, on_rank_zero, this_rank
from aligner.models.gpt.settings import RunFacts
from aligner.models.policy.lm_policy import Policy
from aligner.models.reward.lm_reward import Reward
from aligner.models.value.lm_value import Value
from aligner.observe.environment import describe_environment
from aligner.observe.loggers import make_loggers
from aligner.observe.metric_names import check_names
from aligner.observe.metrics import Logger, MetricsWriter
from aligner.observe.report import write_report
from aligner.observe.samples import SampleWriter
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
    tokenizer, architecture = describe_model(config)
    worlds = (config.trainer.world_size, config.value_world_size)
    for world in worlds:
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
    steps = total_steps(config, sampler)
    policy, value = build_roles(config, inputs.tokenizer, clusters, steps)
    closing.callback(policy.shutdown)
    closing.callback(value.shutdown)
    trainer = PPOTrainer(
        config,
        policy,
        value,
        inputs.reward,
        inputs.train_prompts,
        inputs.val_prompts,
        sampler,
        inputs.tokenizer.pad_id,
        total_steps=steps,
    )
    layout = clusters.describe(config)
    loop = build_loop(config, trainer, layout, console, steps, is_restart, started)
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
        notes=_notes(inputs.train_prompts, restored, layout),
    )
    console.print(startup_report(facts))
    ended = loop.run(None if restored is None else restored.step)
    finish(config, policy, loop, console, ended)


def describe_model(config: RunConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """Tokenizer and architecture of the policy, without reading its weights."""
    with open_model(config.model.restore_from_path) as checkpoint:
        tokenizer = (
            load_tokenizer(config.model.tokenizer)
            if config.model.tokenizer is not None
            else checkpoint.tokenizer
        )
        return tokenizer, checkpoint.architecture


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


def total_steps(config: RunConfig, sampler: PromptSampler) -> int:
    """Steps of the run: ``max_epochs`` worth of prompts, ``max_steps`` at most."""
    limit = config.trainer.ppo.max_steps
    steps = sampler.batches_in(config.trainer.ppo.max_epochs)
    return steps if limit < 0 else min(limit, steps)


def build_roles(
    config: RunConfig, tokenizer: Tokenizer, clusters: Clusters, steps: int
) -> tuple[Policy, Value]:
    """Policy and critic on their clusters; the reference policy where a KL term asks for it."""
    ppo = config.model.ppo
    run = RunFacts(
        precision=config.trainer.precision,
        gradient_clip_val=config.trainer.ppo.gradient_clip_val,
        non_finite=config.trainer.ppo.non_finite,
        non_finite_dir=log_dir(config),
        seed=config.seed,
    )
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


def build_loop(
    config: RunConfig,
    trainer: PPOTrainer,
    layout: str,
    console: Console,
    steps: int,
    is_restart: bool,
    started: float,
) -> RunLoop:
    """The run loop with its files below ``exp_manager.explicit_log_dir``.

    ``started``: when ``trainer.max_time`` began to run, on the monotonic clock.
    """
    exp = config.exp_manager
    folder = log_dir(config)
    store = RunStateStore(
        folder / "run_state",
        exp.save_top_k,
        exp.monitor,
        exp.mode,
        rank=this_rank(),
        exchange=gather_objects,
    )

    def loggers() -> Sequence[Logger]:
        latest = store.states()
        return make_loggers(
            folder,
            restored_step=latest[-1].step if latest else None,
            tensorboard=exp.create_tensorboard_logger,
            wandb=exp.create_wandb_logger,
            wandb_options={
                "project": exp.wandb.project,
                "name": exp.wandb.name,
                **exp.wandb.kwargs,
            },
            config=config.as_dict(),
        )

    limit = config.trainer.max_seconds
    return RunLoop(
        trainer,
        Schedule(
            steps,
            config.trainer.ppo.val_check_interval,
            config.trainer.ppo.save_interval,
            None if limit is None else limit - (time.monotonic() - started),
        ),
        store=store,
        metrics=MetricsWriter(folder, rank=this_rank(), loggers=loggers),
        samples=SampleWriter(folder, rank=this_rank()),
        console=console,
        config=config.as_dict(),
        monitor=exp.monitor,
        layout=layout,
        resume=exp.resume_if_exists or is_restart,
    )


def finish(config: RunConfig, policy: Policy, loop: RunLoop, console: Console, ended: bool) -> None:
    """Write the report and, when the run came to its end, the trained model; say where all is."""
    folder = log_dir(config)
    places = {
        "report": folder / "report.html",
        "samples": folder / "samples.jsonl",
        "metrics": folder / "metrics.jsonl",
    }
    states = loop.store.states()
    if states:
        places["checkpoint"] = states[-1].path
    if ended and config.exp_manager.save_nemo:
        places["trained .nemo"] = folder / "policy.nemo"
        policy.save_checkpoint(str(places["trained .nemo"].absolute()))
    on_rank_zero(
        lambda: write_report(
            folder,
            title=f"PPO of {Path(config.model.restore_from_path).name}",
            config=yaml.safe_dump(config.as_dict(), sort_keys=False),
            environment=describe_environment(accelerator.description()),
            artifacts={name: str(path) for name, path in places.items()},
            status="" if ended else "Stopped by a signal; the same command continues.",
        )
    )
    width = max(len(name) for name in places)
    for name, path in places.items():
        console.print(f"{name:>{width}}  {path}", highlight=False, soft_wrap=True)


def check_log_dir(config: RunConfig) -> None:
    """Refuse a directory that cannot be written or that another process writes, and bad names."""
    check_names([config.exp_manager.monitor])
    on_rank_zero(lambda: MetricsWriter(log_dir(config)).close())


def log_dir(config: RunConfig) -> Path:
    """Directory of the run."""
    return Path(config.exp_manager.explicit_log_dir).expanduser()


def _restored(restoration: Restoration) -> Restored:
    items = ["policy", "critic", "optimizers", "schedules", "data position", "KL coefficient"]
    if restoration.saved_layout is None:
        items.append("random states")
    return Restored(restoration.step, str(restoration.path), items)


def _notes(prompts: PromptDataset, restored: Restoration | None, layout: str) -> list[str]:
    notes = []
    if restored is not None:
        notes += [f"changed since the saved run: {change}" for change in restored.changes]
        if restored.saved_layout is not None:
            notes.append(
                f"saved on {restored.saved_layout}, continued on {layout}: weights and optimizer "
                "states are the same, random generators (dropout) start from the seed"
            )
    if prompts.dropped_too_long:
        notes.append(
            f"{prompts.dropped_too_long} training prompts are longer than data.max_prompt_length "
            "and were dropped"
        )
    return notes
