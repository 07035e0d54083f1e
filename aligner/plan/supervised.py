"""Roles of runs that learn from files."""

from collections.abc import Mapping

from aligner.algorithms.distill.build import teacher_config
from aligner.algorithms.ppo.trainer import TRAIN_COLUMNS
from aligner.algorithms.preference.build import preference_loss
from aligner.algorithms.run.assembly import run_facts
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
from aligner.models.policy.lm_policy import LOGPROB_COLUMNS, Policy
from aligner.models.reward.reward_model import RewardModel
from aligner.plan.roles import (
    Generate,
    HandOver,
    Phase,
    PlannedRole,
    Rows,
    Shape,
    Train,
    policy_scores,
    starting,
)
from aligner.types import LossFunction

_ROWS: Shape = ("B",)


def supervised_roles(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> list[PlannedRole]:
    """Roles of fine-tuning, preferences, reward models and distillation."""
    model, world = config.model, config.trainer.world_size
    dp = model.parallel.data_size(world)
    own = architectures[model.restore_from_path]
    prompt, response = with_length(config, plan, own.max_position_embeddings)
    length = prompt + response
    phases: list[Phase] = []
    found: list[PlannedRole] = []
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
        start = starting(RewardModel, model, run=run, attributes=attributes, max_optimizer_steps=1)
        name = "reward model"
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
                    policy_scores(
                        "logprobs",
                        foreign,
                        "get_logprobs",
                        model.rollout.forward_micro_batch_size,
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
        start = starting(
            Policy,
            model,
            run=facts,
            backend=config.policy.backend,
            init_reference_model=False,
            max_optimizer_steps=1,
        )
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
    start = starting(
        Policy,
        model,
        run=run_facts(config, loop),
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
