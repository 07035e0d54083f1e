"""Roles of runs that learn from files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aligner.algorithms.distill.build import teacher_config
from aligner.algorithms.preference.build import preference_loss
from aligner.algorithms.run.engine import run_settings
from aligner.architecture import GPTArchitecture
from aligner.config import (
    BaseRunConfig,
    DistillRunConfig,
    DPORunConfig,
    RewardRunConfig,
    SFTRunConfig,
    check_layout,
)
from aligner.config.commands.plan import PlanConfig, with_length
from aligner.errors import ConfigError
from aligner.losses.distillation import DistillationLoss
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.handle import TRAINED_COLUMNS
from aligner.models.policy.lm_policy import LOGPROB_COLUMNS, Policy
from aligner.models.reward.reward_model import RewardModel
from aligner.plan.roles import (
    Generate,
    HandOver,
    Phase,
    PlannedRole,
    Rows,
    Shape,
    Start,
    Train,
    policy_scores,
    starting,
)
from aligner.types import LossFunction

_ROWS: Shape = ("B",)


@dataclass(frozen=True)
class _Learner:
    """The role that learns in one kind of run, and what it learns from.

    ``before``: its phases before the update. ``others``: further models. The rest: see `Rows` and
    `PlannedRole`.
    """

    start: Start
    loss: LossFunction
    name: str = "policy"
    columns: tuple[str, ...] = TRAINED_COLUMNS
    trailing: Mapping[str, Shape] = field(default_factory=dict)
    together: int = 1
    before: tuple[Phase, ...] = ()
    attributes: tuple[str, ...] = ()
    others: tuple[PlannedRole, ...] = ()


def supervised_roles(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> list[PlannedRole]:
    """Roles of fine-tuning, preferences, reward models and distillation."""
    model, world = config.model, config.trainer.world_size
    share = model.global_batch_size // model.parallel.data_size(world)
    own = architectures[model.restore_from_path]
    prompt, response = with_length(config, plan, own.max_position_embeddings)
    length = prompt + response
    if isinstance(config, SFTRunConfig):
        start = _start_policy(config)
        learner = _Learner(start, NegativeLogLikelihoodLoss())
    elif isinstance(config, RewardRunConfig):
        learner = _reward_model(config)
    elif isinstance(config, DPORunConfig):
        learner = _preferences(config, share, length)
    elif isinstance(config, DistillRunConfig):
        learner = _distillation(config, architectures, share, prompt, response)
    else:
        raise ConfigError(f"{config.algorithm}: plan does not know this kind of run")
    rows = Rows(share, length, learner.columns, 1, learner.together, learner.trailing)
    train = Train("train", rows, learner.loss, model.micro_batch_size)
    phases = (*learner.before, train, HandOver("save"))
    role = PlannedRole(
        learner.name, own, model, world, "policy", learner.start, phases, learner.attributes
    )
    return [role, *learner.others]


def _start_policy(config: BaseRunConfig) -> Start:
    return starting(
        Policy,
        config.model,
        run=run_settings(config),
        backend=config.policy.backend,
        init_reference_model=False,
        max_optimizer_steps=1,
    )


def _reward_model(config: RewardRunConfig) -> _Learner:
    loop = config.trainer.reward_model
    attributes = tuple(config.data.attribute_columns)
    loss: LossFunction = AttributeRegressionLoss()
    trailing: dict[str, Shape] = {
        name: ("B", len(attributes)) for name in ("attributes", "attribute_mask")
    }
    if not attributes:
        loss, trailing = BradleyTerryLoss(loop.variant), {"preference_strengths": _ROWS}
    start = starting(
        RewardModel,
        config.model,
        run=run_settings(config),
        attributes=attributes,
        max_optimizer_steps=1,
    )
    return _Learner(
        start,
        loss,
        "reward model",
        trailing=trailing,
        together=config.rows_per_example,
        attributes=attributes,
    )


def _preferences(config: DPORunConfig, share: int, length: int) -> _Learner:
    loop = config.trainer.dpo
    before: tuple[Phase, ...] = ()
    if not loop.is_paired:  # the baseline's log-probs, of as many mismatched responses
        mismatched = Rows(share, length, LOGPROB_COLUMNS)
        batch_size = config.model.rollout.forward_micro_batch_size
        before = (policy_scores("logprobs", mismatched, "get_logprobs", batch_size),)
    of_rows = ("ground_truth_rewards", "desirable", "kl_baseline")
    return _Learner(
        _start_policy(config),
        preference_loss(loop),
        columns=(*TRAINED_COLUMNS, "ref_logprobs"),
        trailing=dict.fromkeys(of_rows, _ROWS),
        together=config.rows_per_example,
        before=before,
    )


def _distillation(
    config: DistillRunConfig,
    architectures: Mapping[str, GPTArchitecture],
    share: int,
    prompt: int,
    response: int,
) -> _Learner:
    loop = config.trainer.distill
    before: tuple[Phase, ...] = ()
    if loop.on_policy:
        rollout = config.model.rollout
        slots = min(rollout.rollout_micro_batch_size, share)
        sampling = rollout.sampling_params
        before = (Generate("generate", share, slots, prompt, response, 1, sampling),)
    top = ("teacher_topk_logits", "teacher_topk_indices")
    shape: Shape = ("B", "S", loop.top_k)
    rows = Rows(share, prompt + response, LOGPROB_COLUMNS)
    return _Learner(
        _start_policy(config),
        DistillationLoss(loop.kl, loop.mixed_weight, loop.zero_outside_topk),
        trailing=dict.fromkeys(top, shape),
        before=before,
        others=(_teacher(config, architectures, rows),),
    )


def _teacher(
    config: DistillRunConfig, architectures: Mapping[str, GPTArchitecture], rows: Rows
) -> PlannedRole:
    model, loop = teacher_config(config), config.trainer.distill
    architecture = architectures[model.restore_from_path]
    world = config.trainer.world_size
    check_layout(architecture, model.parallel, world)
    shared = min(architecture.vocab_size, architectures[config.model.restore_from_path].vocab_size)
    start = starting(
        Policy,
        model,
        run=run_settings(config),
        name_prefix="teacher",
        init_optimizer=False,
        init_reference_model=False,
    )
    score = policy_scores(
        "teacher",
        rows,
        "get_topk_logits",
        model.rollout.forward_micro_batch_size,
        k=loop.top_k,
        vocab_size=shared,
    )
    return PlannedRole("teacher", architecture, model, world, "policy", start, (score,))
