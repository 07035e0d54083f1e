"""Arithmetic of phases, and lower bounds of the time and memory of a run."""

import math
from dataclasses import dataclass
from functools import cache

import torch

from aligner.algorithms.run.startup import shapes_of
from aligner.architecture import GPTArchitecture
from aligner.config import CriticConfig
from aligner.config.roles.sampling import RolloutConfig
from aligner.observe.startup import RoleMemory
from aligner_plan.devices import MEMORY_REACHED, DeviceRates
from aligner_plan.roles import Phase, PlannedRole, PlannedRun


def work_of(role: PlannedRole, phase: Phase) -> tuple[float, float]:
    """Return the tokens of all ranks, and the model's arithmetic on them."""
    tokens = float(role.rows(phase) * role.parallel.data_size(role.world) * phase.times)
    tokens *= phase.response or phase.length
    weights = matrix_parameters(role.architecture)
    return tokens, (6.0 if phase.is_update else 2.0) * weights * tokens


@cache
def matrix_parameters(architecture: GPTArchitecture) -> int:
    """Count the parameters that a token is multiplied with.

    An embedding that is only looked up does not count, nor do experts that the token skips.
    """
    parameters, experts = _parameters(architecture)
    idle = 1 - architecture.moe_router_topk / (architecture.num_moe_experts or 1)
    embedding = architecture.vocab_size * architecture.hidden_size
    looked_up = 0 if architecture.tie_embeddings else embedding
    return parameters - looked_up - round(experts * idle if experts else 0)


def _parameters(architecture: GPTArchitecture) -> tuple[int, int]:
    """Count the parameters of a model, and the parameters of its experts."""
    sizes = {name: math.prod(shape) for name, shape in shapes_of(architecture).items()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)


def bubble_of(role: PlannedRole, phase: Phase) -> float:
    """Return the factor by which idle stages lengthen a phase: (m + p - 1) / m, m micro-batches.

    Narayanan et al. 2021. A sampled token passes every stage before the next one.
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
class LowerBounds:
    """Lower bounds of a run, computed without a measurement."""

    step_seconds: float
    card_bytes: float


def lower_bounds(run: PlannedRun, device: DeviceRates) -> LowerBounds:
    """Bound the time by the products of the layers, the memory by weights, gradients, optimizer."""
    seconds = sum(
        _product_seconds(run.roles[role], phase, device)
        for role, name in run.step
        for phase in run.roles[role].phases
        if phase.name == name
    )
    return LowerBounds(seconds, max(_card_bytes(run, role) for role in run.roles.values()))


def _product_seconds(role: PlannedRole, phase: Phase, device: DeviceRates) -> float:
    """Compute the time of the layers' products. Decoding also reads the weights for every token."""
    parameters = matrix_parameters(role.architecture)
    # The output layer only multiplies the tokens of answers.
    layers = parameters - role.architecture.vocab_size * role.architecture.hidden_size
    _, flops = work_of(role, phase)
    itemsize = _weight_bytes(role)
    rate = device.flops(torch.bfloat16 if itemsize == 2 else torch.float32)
    seconds = flops * (layers / parameters) / role.world / rate
    if phase.response and role.architecture.num_moe_experts is None:
        parts = role.parallel.tensor * role.parallel.pipeline
        reads = role.rows(phase) / role.slots(phase) * max(0, phase.response - 1)
        seconds = max(seconds, reads * layers * itemsize / parts / (MEMORY_REACHED * device.memory))
    return seconds * bubble_of(role, phase)


def _card_bytes(run: PlannedRun, role: PlannedRole) -> float:
    """Bound the memory of a card while ``role`` works, including other roles on the card."""
    memory = _memory(role)
    idle_roles = [
        _idle_bytes(idle)
        for idle in run.roles.values()
        if idle.name != role.name and idle.cards == role.cards
    ]
    return sum(part.total for part in memory) + _reference(role, memory) + sum(idle_roles)


def _idle_bytes(role: PlannedRole) -> float:
    """Return the memory that is certain to remain on the card while other roles work."""
    if role.engine is not None:
        return 0.0
    memory, section = _memory(role), role.section
    options: CriticConfig | RolloutConfig
    if isinstance(section, CriticConfig):
        offloads_weights, options = section.offload_weights, section
    else:
        options = section.rollout
        offloads_weights = options.offload_weights or role.options.get("offload_weights", False)
    if offloads_weights:
        return 0.0
    size = sum(float(part.weights) for part in memory)
    if not options.offload_gradients:
        size += sum(part.gradients for part in memory)
        if not options.offload_adam_states:
            size += sum(part.optimizer for part in memory)
    return size + _reference(role, memory)


def _reference(role: PlannedRole, memory: list[RoleMemory]) -> float:
    """Return the bytes of the frozen reference weights, which adapters make unnecessary."""
    if not role.options.get("init_reference_model") or role.model.peft.lora is not None:
        return 0.0
    if role.model.reference_mode != "keep":
        return 0.0
    return float(sum(part.weights for part in memory))


def _memory(role: PlannedRole) -> list[RoleMemory]:
    """Return the memory of the average rank: its share of the common weights, and of experts."""
    parameters, experts = _parameters(role.architecture)
    layout = role.parallel
    learns = role.learns and role.model.peft.lora is None
    sharded = role.is_dtensor  # weights and gradients too, in float32
    itemsize = _weight_bytes(role)
    moments = 8 if role.section.optim.name == "adam" else 0
    memory = []
    for count, parts in (
        (parameters - experts, layout.tensor * layout.pipeline),
        (experts, layout.pipeline * (layout.expert if layout.expert > 1 else layout.tensor)),
    ):
        parts = role.world if sharded else parts
        memory.append(
            RoleMemory(
                "",
                count,
                trainable=learns,
                model_parallel_size=parts,
                optimizer_shards=max(1, role.world // parts),
                weight_bytes=4 if sharded else itemsize,
                gradient_bytes=0 if sharded else 4,
                optimizer_bytes=moments if sharded or itemsize == 4 else moments + 4,
            )
        )
    return memory


def _weight_bytes(role: PlannedRole) -> int:
    """Return the bytes of a weight in the forward pass."""
    return 2 if role.options["run"].precision == "bf16" else 4
