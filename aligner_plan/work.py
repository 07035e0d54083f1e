"""Arithmetic of phases, and the least that any layout of a run needs."""

import math
from dataclasses import dataclass
from functools import cache

import torch

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.config import CriticConfig
from aligner.config.roles.sampling import RolloutConfig
from aligner.observe.memory import RoleMemory
from aligner_plan.devices import MEMORY_REACHED, DeviceRates
from aligner_plan.roles import Phase, PlannedRole, PlannedRun


def work_of(role: PlannedRole, phase: Phase) -> tuple[float, float]:
    """Tokens of all ranks, and the model's arithmetic on them."""
    tokens = float(role.rows(phase) * role.parallel.data_size(role.world) * phase.times)
    tokens *= phase.response or phase.length
    weights = matrix_parameters(role.architecture)
    return tokens, (6.0 if phase.is_update else 2.0) * weights * tokens


@cache
def matrix_parameters(architecture: GPTArchitecture) -> int:
    """Parameters that a token meets in products: no embedding that is only looked up, and of the
    experts those that it is sent to."""
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(architecture).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = 1 - architecture.moe_router_topk / (architecture.num_moe_experts or 1)
    embedding = architecture.vocab_size * architecture.hidden_size
    looked_up = 0 if architecture.tie_embeddings else embedding
    return sum(sizes.values()) - looked_up - round(experts * idle if experts else 0)


def bubble_of(role: PlannedRole, phase: Phase) -> float:
    """Factor by which waiting stages lengthen a phase: (m + p - 1) / m with m micro-batches.

    Narayanan et al. 2021. A token is sampled once it has passed every stage.
    """
    stages = role.parallel.pipeline
    if phase.method in ("", "generate"):
        return float(stages) if phase.method else 1.0
    budget = role.model.token_budgets
    if budget is None:
        size = role.micro_batch_size(phase)
    else:
        size = max(1, budget.train_mb_tokens // phase.length)
    micro_batches = max(1, -(-role.rows(phase) // size))
    return (micro_batches + stages - 1) / micro_batches


@dataclass(frozen=True)
class Least:
    """Lower bounds of a run, by arithmetic only: nothing is measured."""

    step_seconds: float
    card_bytes: float


def least_of(run: PlannedRun, device: DeviceRates) -> Least:
    """Time of the layers' products, and bytes of weights, gradients and optimizers."""
    seconds = sum(
        _least_seconds(run.roles[role], phase, device)
        for role, name in run.step
        for phase in run.roles[role].phases
        if phase.name == name
    )
    return Least(seconds, max(_least_bytes(run, role) for role in run.roles.values()))


def _least_seconds(role: PlannedRole, phase: Phase, device: DeviceRates) -> float:
    """Products of the layers; of decoding, the reading of their weights for every token."""
    layers = matrix_parameters(role.architecture)
    layers -= role.architecture.vocab_size * role.architecture.hidden_size  # of answers only
    _, flops = work_of(role, phase)
    itemsize = _weight_bytes(role)
    rate = device.flops(torch.bfloat16 if itemsize == 2 else torch.float32)
    share = layers / matrix_parameters(role.architecture)
    seconds = flops * share / role.world / rate
    if phase.response and role.architecture.num_moe_experts is None:
        parts = role.parallel.tensor * role.parallel.pipeline
        reads = role.rows(phase) / role.slots(phase) * max(0, phase.response - 1)
        seconds = max(seconds, reads * layers * itemsize / parts / (MEMORY_REACHED * device.memory))
    return seconds * bubble_of(role, phase)


def _least_bytes(run: PlannedRun, role: PlannedRole) -> float:
    """Least memory of a card while ``role`` learns or works: its own, and other roles' on it."""
    own = _memory(role)
    beside = [
        _resting(other)
        for other in run.roles.values()
        if other.name != role.name and other.cards == role.cards
    ]
    return sum(each.total for each in own) + _reference(role, own) + sum(beside)


def _resting(role: PlannedRole) -> float:
    """Memory that is certain to stay on the card while others work."""
    if role.engine is not None:
        return 0.0
    memory, section = _memory(role), role.section
    options: CriticConfig | RolloutConfig
    if isinstance(section, CriticConfig):
        leaves, options = section.offload_weights, section
    else:
        options = section.rollout
        leaves = options.offload_weights or role.options.get("offload_weights", False)
    if leaves:
        return 0.0
    stays = sum(float(each.weights) for each in memory)
    if not options.offload_gradients:
        stays += sum(each.gradients for each in memory)
        if not options.offload_adam_states:
            stays += sum(each.optimizer for each in memory)
    return stays + _reference(role, memory)


def _reference(role: PlannedRole, memory: list[RoleMemory]) -> float:
    """Frozen weights beside the policy's own; with adapters there are none."""
    if not role.options.get("init_reference_model") or role.model.peft.lora is not None:
        return 0.0
    if role.model.reference_mode != "keep":
        return 0.0
    return float(sum(each.weights for each in memory))


def _memory(role: PlannedRole) -> list[RoleMemory]:
    """Memory of the average rank: its part of what all ranks of a stage share, and of experts."""
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(role.architecture).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layout = role.parallel
    learns = role.learns and role.model.peft.lora is None
    sharded = role.is_dtensor  # weights and gradients too, in float32
    itemsize = _weight_bytes(role)
    moments = 8 if role.section.optim.name == "adam" else 0
    found = []
    for parameters, parts in (
        (sum(sizes.values()) - experts, layout.tensor * layout.pipeline),
        (experts, layout.pipeline * (layout.expert if layout.expert > 1 else layout.tensor)),
    ):
        parts = role.world if sharded else parts
        found.append(
            RoleMemory(
                "",
                parameters,
                trainable=learns,
                model_parallel_size=parts,
                optimizer_shards=max(1, role.world // parts),
                weight_bytes=4 if sharded else itemsize,
                gradient_bytes=0 if sharded else 4,
                optimizer_bytes=moments if sharded or itemsize == 4 else moments + 4,
            )
        )
    return found


def _weight_bytes(role: PlannedRole) -> int:
    """Bytes of a weight in the forward pass."""
    return 2 if role.options["run"].precision == "bf16" else 4
