"""Roles of a configuration."""

from collections.abc import Mapping

from aligner.architecture import GPTArchitecture
from aligner.config import BaseRunConfig, SamplingRunConfig, check_layout
from aligner.config.commands.plan import PlanConfig
from aligner.plan.roles import PlannedRun
from aligner.plan.sampling import sampling_roles
from aligner.plan.supervised import supervised_roles


def planned_run(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> PlannedRun:
    """Roles and phases of a training configuration.

    ``architectures``: by the path of each model that the configuration names.

    Raises:
        ConfigError: a kind of run that cannot be looked at before, or lengths that do not fit.
        LayoutError: a model cannot be cut so.
    """
    own = architectures[config.model.restore_from_path]
    check_layout(own, config.model.parallel, config.trainer.world_size)
    if isinstance(config, SamplingRunConfig):
        roles = sampling_roles(config, plan, architectures)
    else:
        roles = supervised_roles(config, plan, architectures)
    order = ("generate", "rewards", "teacher", "values", "logprobs", "reference_logprobs", "train")
    rank = {name: place for place, name in enumerate((*order, "refit", "save"))}
    step = sorted(
        ((role.name, phase.name) for role in roles for phase in role.phases),
        key=lambda each: (rank[each[1]], each[0] != "critic"),  # the critic learns first
    )
    return PlannedRun(config, {role.name: role for role in roles}, tuple(step))
