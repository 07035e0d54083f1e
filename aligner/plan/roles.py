"""Which roles a configuration has, and what each does in one step of its algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from aligner.algorithms.assembly import run_facts
from aligner.algorithms.build_distill import teacher_config
from aligner.algorithms.build_preference import preference_loss
from aligner.algorithms.build_reward import frozen_beside
from aligner.algorithms.losses.distillation import DistillationLoss
from aligner.algorithms.losses.language import NegativeLogLikelihoodLoss
from aligner.algorithms.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.algorithms.losses.value import PPOValueLoss
from aligner.algorithms.ppo import (
    CRITIC_COLUMNS,
    POLICY_COLUMNS,
    TRAIN_COLUMNS,
    make_policy_loss,
    needs_reference,
    sampler_is_exact,
)
from aligner.architecture import GPTArchitecture
from aligner.config import (
    BaseRunConfig,
    DistillRunConfig,
    DPORunConfig,
    ParallelConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    SamplingParams,
    SamplingRunConfig,
    SFTRunConfig,
    TrainedModelConfig,
    VllmConfig,
    check_layout,
)
from aligner.config.plan import PlanConfig, with_length
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.worker_groups import LocalCluster
from aligner.errors import ConfigError
from aligner.models.policy.lm_policy import LOGPROB_COLUMNS, Policy
from aligner.models.reward.reward_model import REWARD_COLUMNS, RewardModel
from aligner.models.role_front import RoleFront
from aligner.models.value.lm_value import VALUE_COLUMNS, Value
from aligner.types import LossFunction

Shape = tuple[str | int, ...]
_ROWS: Shape = ("B",)
Start = Callable[[LocalCluster, Tokenizer], RoleFront]


@dataclass(frozen=True)
class Rows:
    """Sequences of a phase: all of one length, the longest possible.

    ``count``: of a data-parallel rank, in each of ``times`` parts of a step. ``trailing``: shape
    behind ``[B, S]`` or ``[B]`` of columns that are not ``[B, S]`` floats; see `measure.columns`.
    """

    count: int
    length: int
    columns: tuple[str, ...]
    times: int = 1
    together: int = 1  # adjacent rows that one micro-batch must hold
    trailing: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Train:
    """Updates."""

    name: str
    rows: Rows
    loss: LossFunction
    micro_batch_size: int


@dataclass(frozen=True)
class Score:
    """Forward passes: the worker's method ``call``, between the two that enter and leave."""

    name: str
    rows: Rows
    call: str
    micro_batch_size: int
    enter: str = "prepare_for_inference"
    leave: str | None = "finish_inference"
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Generate:
    """A rollout of ``rows`` responses on a rank, ``slots`` at a time."""

    name: str
    rows: int
    slots: int
    prompt: int
    response: int
    per_prompt: int
    sampling: SamplingParams


@dataclass(frozen=True)
class HandOver:
    """What happens beside the step: ``refit`` of engines, ``save`` of the run state."""

    name: str
    buffer_bytes: int = 0  # what one group of tensors takes on its way


Phase = Train | Score | Generate | HandOver


@dataclass(frozen=True)
class PlannedRole:
    """A model of the run: how it starts, and its phases in the order of a step."""

    name: str
    architecture: GPTArchitecture
    model: TrainedModelConfig  # its layout and token budgets
    world: int  # processes
    cards: str  # roles of one name share cards
    start: Start
    phases: tuple[Phase, ...]
    attributes: tuple[str, ...] = ()
    engine: VllmConfig | None = None  # what vLLM is given, of a role that stands for its engines

    @property
    def parallel(self) -> ParallelConfig:
        """Its layout."""
        return self.model.parallel


@dataclass(frozen=True)
class PlannedRun:
    """The roles of a run, and the order of a step: (role, phase)."""

    config: BaseRunConfig
    roles: dict[str, PlannedRole]
    step: tuple[tuple[str, str], ...]


def planned_run(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> PlannedRun:
    """Roles and phases of a training configuration.

    ``architectures``: by the path of each model that the configuration names.

    Raises:
        ConfigError: a kind of run that cannot be looked at before.
        LayoutError: a model cannot be cut so.
    """
    own = architectures[config.model.restore_from_path]
    if config.policy.backend != "megatron":
        raise ConfigError(
            f"policy.backend={config.policy.backend}: plan runs the roles of megatron-core alone; "
            "set policy.backend=megatron, whose memory is near where layouts are the same"
        )
    check_layout(own, config.model.parallel, config.trainer.world_size)
    if isinstance(config, SamplingRunConfig):
        roles = _sampling_roles(config, plan, architectures)
    else:
        roles = _supervised_roles(config, plan, architectures)
    order = ("generate", "rewards", "teacher", "values", "logprobs", "reference_logprobs", "train")
    rank = {name: place for place, name in enumerate((*order, "refit", "save"))}
    step = sorted(
        ((role.name, phase.name) for role in roles for phase in role.phases),
        key=lambda each: (rank[each[1]], each[0] != "critic"),  # the critic learns first
    )
    return PlannedRun(config, {role.name: role for role in roles}, tuple(step))


def _sampling_roles(
    config: SamplingRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> list[PlannedRole]:
    """Of PPO, its kin without a critic, and rejection sampling."""
    rollout, model = config.model.rollout, config.model
    own = architectures[model.restore_from_path]
    prompt, response = with_length(config, plan, own.max_position_embeddings)
    length = prompt + response
    dp = model.parallel.data_size(config.trainer.world_size)
    share = -(-rollout.num_rollout_samples // dp)
    facts = run_facts(config, config.loop)
    reference = isinstance(config, RunConfig) and needs_reference(config)

    def start(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
        return Policy(
            cluster,
            model,
            tokenizer,
            run=facts,
            init_reference_model=reference,
            max_optimizer_steps=1,
        )

    draws = Generate(
        "generate",
        share,
        min(rollout.rollout_micro_batch_size, share),
        prompt,
        response,
        rollout.num_rollouts_per_prompt,
        rollout.sampling_params,
    )
    engines = config.generation.backend == "vllm"
    phases: list[Phase] = [] if engines else [draws]
    if isinstance(config, RunConfig):
        phases += _ppo_phases(config, share, length, dp)
    elif isinstance(config, RSRunConfig):
        kept = rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
        kept *= config.model.rs.top_n_rollouts
        phases.append(_updates(model, dp, kept, length, TRAIN_COLUMNS, NegativeLogLikelihoodLoss()))
    vllm = config.generation.vllm
    if engines:
        buffer = int(vllm.refit_buffer_mb * (1 << 20))
        phases.append(HandOver("refit", buffer if vllm.refit == "colocated" else 0))
    phases.append(HandOver("save"))
    found = [
        PlannedRole("policy", own, model, config.trainer.world_size, "policy", start, tuple(phases))
    ]
    if isinstance(config, RunConfig) and config.critic is not None:
        found.append(_critic(config, plan, architectures, length))
    if config.reward.model is not None and not config.reward.model.share_body_with_critic:
        found.append(_reward_model(config, architectures, length))
    if engines:
        found.append(_engine(config, own, draws))
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
        return Score(
            name, Rows(rows, length, LOGPROB_COLUMNS), call, size, "prepare_for_lp_inference", None
        )

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
    critic, facts = config.critic, run_facts(config, config.trainer.ppo)
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

    def start(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
        return Value(
            cluster, critic, tokenizer, model=config.model, run=facts, max_optimizer_steps=1
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

    def start(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
        return RewardModel(
            cluster,
            model,
            tokenizer,
            run_facts(config, config.loop),
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


def _engine(
    config: SamplingRunConfig, architecture: GPTArchitecture, draws: Generate
) -> PlannedRole:
    """vLLM, as our own generator draws in its layout, with the memory that vLLM is given."""
    vllm = config.generation.vllm.on_device(has_gpu=True, ahead=config.generation.async_rollouts)
    model = replace(
        config.model,
        tensor_model_parallel_size=vllm.tensor_parallel_size,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )
    check_layout(architecture, model.parallel, vllm.workers, "generation.vllm")
    rows = -(-config.model.rollout.num_rollout_samples // vllm.engines)

    def start(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
        return Policy(
            cluster,
            model,
            tokenizer,
            run=run_facts(config, config.loop),
            init_optimizer=False,
            init_reference_model=False,
        )

    return PlannedRole(
        "engine",
        architecture,
        model,
        vllm.workers,
        "policy" if vllm.refit == "colocated" else "engine",
        start,
        (replace(draws, rows=rows, slots=min(draws.slots, rows)),),
        engine=vllm,
    )


def _supervised_roles(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> list[PlannedRole]:
    """Of fine-tuning, preferences, reward models and distillation."""
    model, world = config.model, config.trainer.world_size
    dp = model.parallel.data_size(world)
    own = architectures[model.restore_from_path]
    prompt, response = with_length(config, plan, own.max_position_embeddings)
    length = prompt + response
    phases: list[Phase] = []
    found: list[PlannedRole] = []
    start: Start
    columns: tuple[str, ...] = TRAIN_COLUMNS
    trailing: dict[str, Shape] = {}
    if isinstance(config, RewardRunConfig):
        reward_loop = config.trainer.reward_model
        attributes = tuple(config.data.attribute_columns)
        loss: LossFunction = AttributeRegressionLoss()
        if attributes:
            trailing = {name: ("B", len(attributes)) for name in ("attributes", "attribute_mask")}
        else:
            loss = BradleyTerryLoss(reward_loop.variant)
            trailing = {"preference_strengths": ("B",)}
        run = run_facts(config, reward_loop)

        def start_reward(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
            return RewardModel(
                cluster, model, tokenizer, run, attributes=attributes, max_optimizer_steps=1
            )

        start, name = start_reward, "reward model"
        together = config.rows_per_example
    else:
        attributes, name, together = (), "policy", 1
        if isinstance(config, SFTRunConfig):
            facts, loss = run_facts(config, config.trainer.sft), NegativeLogLikelihoodLoss()
        elif isinstance(config, DPORunConfig):
            loop = config.trainer.dpo
            facts, loss = run_facts(config, loop), preference_loss(loop)
            together = config.rows_per_example
            columns = (*TRAIN_COLUMNS, "ref_logprobs")
            of_rows = ("ground_truth_rewards", "desirable", "kl_baseline")
            trailing = dict.fromkeys(of_rows, _ROWS)
            if not loop.is_paired:  # the baseline's log-probs, of as many foreign responses
                foreign = Rows(model.global_batch_size // dp, length, LOGPROB_COLUMNS)
                phases.append(
                    Score(
                        "logprobs",
                        foreign,
                        "get_logprobs",
                        model.rollout.forward_micro_batch_size,
                        "prepare_for_lp_inference",
                        None,
                    )
                )
        elif isinstance(config, DistillRunConfig):
            distill = config.trainer.distill
            facts = run_facts(config, distill)
            loss = DistillationLoss(distill.kl, distill.mixed_weight, distill.zero_outside_topk)
            top = ("teacher_topk_logits", "teacher_topk_indices")
            shape: Shape = ("B", "S", distill.top_k)
            trailing = dict.fromkeys(top, shape)
            share = model.global_batch_size // dp
            if distill.on_policy:
                rollout = model.rollout
                slots = min(rollout.rollout_micro_batch_size, share)
                sampling = rollout.sampling_params
                phases.append(Generate("generate", share, slots, prompt, response, 1, sampling))
            found.append(_teacher(config, architectures, Rows(share, length, LOGPROB_COLUMNS)))
        else:
            raise ConfigError(f"{config.algorithm}: plan does not know this kind of run")

        def start_policy(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
            return Policy(
                cluster,
                model,
                tokenizer,
                run=facts,
                init_reference_model=False,
                max_optimizer_steps=1,
            )

        start = start_policy
    rows = Rows(model.global_batch_size // dp, length, columns, 1, together, trailing)
    phases += [Train("train", rows, loss, model.micro_batch_size), HandOver("save")]
    role = PlannedRole(name, own, model, world, "policy", start, tuple(phases), attributes)
    return [role, *found]


def _teacher(
    config: DistillRunConfig, architectures: Mapping[str, GPTArchitecture], rows: Rows
) -> PlannedRole:
    model, loop = teacher_config(config), config.trainer.distill
    architecture = architectures[model.restore_from_path]
    world = config.trainer.world_size
    check_layout(architecture, model.parallel, world)
    shared = min(architecture.vocab_size, architectures[config.model.restore_from_path].vocab_size)

    def start(cluster: LocalCluster, tokenizer: Tokenizer) -> RoleFront:
        return Policy(
            cluster,
            model,
            tokenizer,
            run=run_facts(config, loop),
            name_prefix="teacher",
            init_optimizer=False,
            init_reference_model=False,
        )

    score = Score(
        "teacher",
        rows,
        "get_topk_logits",
        model.rollout.forward_micro_batch_size,
        "prepare_for_lp_inference",
        None,
        {"k": loop.top_k, "vocab_size": shared},
    )
    return PlannedRole("teacher", architecture, model, world, "policy", start, (score,))


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
