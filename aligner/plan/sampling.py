"""Roles of runs that learn from their own samples."""

from collections.abc import Mapping
from dataclasses import replace

from aligner.algorithms.ppo.build import make_policy_loss, needs_reference, sampler_is_exact
from aligner.algorithms.ppo.trainer import CRITIC_COLUMNS, POLICY_COLUMNS
from aligner.algorithms.rollout.reward_source import frozen_beside
from aligner.algorithms.run.engine import run_settings
from aligner.architecture import GPTArchitecture
from aligner.config import (
    EngineResources,
    RSRunConfig,
    RunConfig,
    SamplingRunConfig,
    TrainedModelConfig,
    check_layout,
)
from aligner.config.commands.plan import PlanConfig, with_length
from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.handle import TRAINED_COLUMNS
from aligner.models.policy.lm_policy import LOGPROB_COLUMNS, Policy
from aligner.models.reward.reward_model import REWARD_COLUMNS, RewardModel
from aligner.models.value.lm_value import VALUE_COLUMNS, Value
from aligner.plan.roles import (
    Generate,
    HandOver,
    Phase,
    PlannedRole,
    Rows,
    Score,
    Train,
    policy_scores,
    starting,
)
from aligner.types import LossFunction


def sampling_roles(
    config: SamplingRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> list[PlannedRole]:
    """Roles of PPO, of its variants without a critic, and of rejection sampling."""
    rollout, model = config.model.rollout, config.model
    own = architectures[model.restore_from_path]
    prompt, response = with_length(config, plan, own.max_position_embeddings)
    length = prompt + response
    dp = model.parallel.data_size(config.trainer.world_size)
    share = -(-rollout.num_rollout_samples // dp)
    run = run_settings(config)
    reference = isinstance(config, RunConfig) and needs_reference(config)

    start = starting(
        Policy,
        model,
        run=run,
        backend=config.policy.backend,
        init_reference_model=reference,
        max_optimizer_steps=1,
    )

    generate = Generate(
        "generate",
        share,
        min(rollout.rollout_micro_batch_size, share),
        prompt,
        response,
        rollout.num_rollouts_per_prompt,
        rollout.sampling_params,
    )
    engines = _engine_resources(config)
    phases: list[Phase] = [generate] if engines is None else []
    if isinstance(config, RunConfig):
        phases += _ppo_phases(config, share, length, dp)
    elif isinstance(config, RSRunConfig):
        kept = rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
        kept *= config.model.rs.top_n_rollouts
        phases.append(
            _updates(model, dp, kept, length, TRAINED_COLUMNS, NegativeLogLikelihoodLoss())
        )
    if engines is not None:
        buffer = int(engines.refit_buffer_mb * (1 << 20))
        phases.append(HandOver("refit", buffer if engines.shares_devices else 0))
    phases.append(HandOver("save"))
    found = [
        PlannedRole("policy", own, model, config.trainer.world_size, "policy", start, tuple(phases))
    ]
    if isinstance(config, RunConfig) and config.critic is not None:
        found.append(_critic(config, plan, architectures, length))
    if config.reward.model is not None and not config.reward.model.share_body_with_critic:
        found.append(_reward_model(config, architectures, length))
    if engines is not None:
        found.append(_engine(config, own, generate, engines))
    return found


def _ppo_phases(config: RunConfig, share: int, length: int, dp: int) -> list[Phase]:
    ppo, loop = config.model.ppo, config.trainer.ppo
    phases: list[Phase] = []
    charges = loop.initial_policy_kl_penalty > 0
    known = 0 if ppo.ppo_epochs > 1 else config.model.global_batch_size // dp
    if charges and not sampler_is_exact(config):
        known = 0
    scored = max(0, share - known)
    size = ppo.forward_micro_batch_size

    def scores(name: str, call: str, rows: int) -> Score:
        return policy_scores(name, Rows(rows, length, LOGPROB_COLUMNS), call, size)

    if scored:
        phases.append(scores("logprobs", "get_logprobs", scored))
    columns: tuple[str, ...] = (*POLICY_COLUMNS, "prev_logprobs")
    if needs_reference(config):
        phases.append(scores("reference_logprobs", "get_reference_policy_logprobs", share))
        columns += ("ref_logprobs",)
    samples = ppo.num_rollout_samples * ppo.ppo_epochs
    phases.append(_updates(config.model, dp, samples, length, columns, make_policy_loss(config)))
    return phases


def _critic(
    config: RunConfig,
    plan: PlanConfig,
    architectures: Mapping[str, GPTArchitecture],
    length: int,
) -> PlannedRole:
    critic, run = config.critic, run_settings(config)
    assert critic is not None
    model = critic.laid_out(config.model)
    world = config.value_world_size
    dp = model.parallel.data_size(world)
    path = critic.restore_from_path or config.model.restore_from_path
    if plan.architecture is not None and path not in architectures:
        path = config.model.restore_from_path
    check_layout(architectures[path], model.parallel, world, "critic")
    samples = config.model.ppo.num_rollout_samples
    scored = Rows(-(-samples // dp), length, VALUE_COLUMNS)
    trained = Rows(
        critic.global_batch_size // dp,
        length,
        CRITIC_COLUMNS,
        config.model.ppo.ppo_epochs * samples // critic.global_batch_size,
    )
    apart = config.cluster.engine == "ray" and not config.cluster.colocated

    start = starting(
        Value,
        critic,
        model=config.model,
        run=run,
        backend=config.policy.backend,
        max_optimizer_steps=1,
    )

    phases: list[Phase] = [
        Score("values", scored, "get_values", critic.forward_micro_batch_size),
        Train("train", trained, PPOValueLoss(critic.value_clip), critic.micro_batch_size),
        HandOver("save"),
    ]
    reward = config.reward.model
    if reward is not None and reward.share_body_with_critic:  # its weights in the critic's body
        phases.insert(0, Score("rewards", scored, "get_values", reward.micro_batch_size))
    cards = "critic" if apart else "policy"
    return PlannedRole("critic", architectures[path], model, world, cards, start, tuple(phases))


def _reward_model(
    config: SamplingRunConfig, architectures: Mapping[str, GPTArchitecture], length: int
) -> PlannedRole:
    reward = config.reward.model
    assert reward is not None
    model = frozen_beside(config.model, reward)
    world = reward.workers or config.trainer.world_size
    rows = -(-config.model.rollout.num_rollout_samples // model.parallel.data_size(world))

    start = starting(
        RewardModel,
        model,
        run=run_settings(config),
        attributes=(),
        init_optimizer=False,
        offload_weights=reward.offload_weights,
    )

    score = Score(
        "rewards", Rows(rows, length, REWARD_COLUMNS), "get_rewards", reward.micro_batch_size
    )
    cards = "policy" if reward.workers is None else "reward model"
    architecture = architectures[reward.restore_from_path]
    return PlannedRole("reward model", architecture, model, world, cards, start, (score,))


def _engine_resources(config: SamplingRunConfig) -> EngineResources | None:
    """Resources of the engines; None: the policy's own workers sample."""
    resources = config.generation.resources(has_gpu=True)
    if resources is None and config.generation.engine is not None:
        raise ConfigError(
            f"generation.backend={config.generation.backend}: this engine does not state its "
            "resources, so that it cannot be planned; override EngineConfig.resources"
        )
    return resources


def _engine(
    config: SamplingRunConfig,
    architecture: GPTArchitecture,
    generate: Generate,
    engines: EngineResources,
) -> PlannedRole:
    """The engines, as our own generator samples in their layout, with the memory they are given."""
    model = replace(
        config.model,
        tensor_model_parallel_size=engines.devices_of_each,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )
    check_layout(architecture, model.parallel, engines.workers, config.generation.engine_key)
    rows = -(-config.model.rollout.num_rollout_samples // engines.engines)

    start = starting(
        Policy,
        model,
        run=run_settings(config),
        init_optimizer=False,
        init_reference_model=False,
    )

    return PlannedRole(
        "engine",
        architecture,
        model,
        engines.workers,
        "policy" if engines.shares_devices else "engine",
        start,
        (replace(generate, rows=rows, slots=min(generate.slots, rows)),),
        engine=engines,
    )


def _updates(
    model: TrainedModelConfig,
    dp: int,
    samples: int,
    length: int,
    columns: tuple[str, ...],
    loss: LossFunction,
) -> Train:
    """Passes of a sampling run's policy: ``samples`` rows, an update for each global batch."""
    rows = Rows(
        model.global_batch_size // dp, length, columns, max(1, samples // model.global_batch_size)
    )
    return Train("train", rows, loss, model.micro_batch_size)
