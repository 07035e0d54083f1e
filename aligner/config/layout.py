"""Parallel layouts, and the conditions that a model and a world size impose on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from aligner.architecture import GPTArchitecture
from aligner.config.combinations import multiples_near
from aligner.errors import LayoutError

LayerSpec = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True)
class LayerOptions:
    """Implementation of the transformer layers. Not stored in checkpoints."""

    spec: LayerSpec = "auto"
    fusions: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the model-parallel axes. The remaining processes are data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    first_stage: int | None = None  # layers of the first pipeline stage (None: as middle stages)
    last_stage: int | None = None

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that hold one copy of the model, without expert parallelism."""
        return self.tensor * self.pipeline * self.context

    @property
    def sequence_multiple(self) -> int:
        """2 x context-parallel size, or 1 for size 1. Padded lengths are multiples of this."""
        return 2 * self.context if self.context > 1 else 1

    def row_multiple(self, sequence_length_round: int = 1) -> int:
        """Return a multiple of ``sequence_length_round`` that divides row lengths on every rank."""
        # Sequence parallelism splits a row over the tensor-parallel ranks.
        shares = self.tensor if self.sequence_parallel else 1
        return math.lcm(shares, sequence_length_round)

    def data_size(self, world_size: int) -> int:
        """Return the data-parallel size for ``world_size`` processes."""
        return world_size // self.model_parallel_size


def check_layout(
    architecture: GPTArchitecture, parallel: ParallelConfig, world_size: int, section: str = "model"
) -> None:
    """Raise `LayoutError` if a layout does not fit. ``section``: key of the layout in messages."""
    if problems := [*_layout_problems(architecture, parallel, world_size, section)]:
        raise LayoutError("\n".join(problems))


def _layout_problems(
    architecture: GPTArchitecture, parallel: ParallelConfig, world_size: int, section: str
) -> Iterator[str]:
    # Processes.
    size, experts = parallel.model_parallel_size, architecture.num_moe_experts
    if world_size % size:
        yield (
            f"{world_size} processes cannot be split into tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline} x context {parallel.context} = {size}. Start "
            f"{multiples_near(world_size, size)} (trainer.devices x num_nodes), or change the sizes"
        )

    # Tensor and sequence parallelism.
    counts = {
        "attention heads": architecture.num_attention_heads,
        "query groups": architecture.num_query_groups,
        "hidden columns": architecture.hidden_size,
    }
    if experts is None or architecture.layers_without_experts:
        counts["feed-forward columns"] = architecture.ffn_hidden_size
    if experts is not None and parallel.expert == 1:  # otherwise no expert is split
        counts["expert columns"] = architecture.expert_ffn_hidden_size
    if architecture.moe_shared_expert_size is not None:
        counts["shared expert columns"] = architecture.moe_shared_expert_size
    key = f"{section}.tensor_model_parallel_size"
    yield from _not_divided(key, parallel.tensor, counts)
    yield from _stage_problems(architecture.num_layers, parallel, section)
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield (
            f"{section}.sequence_parallel=true needs {key} > 1, got 1. Set it to false or raise "
            "the tensor parallel size"
        )
    if experts is not None and parallel.tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"{key}={parallel.tensor} with a mixture of experts: megatron-core trains it with "
            f"sequence parallelism only. Set {section}.sequence_parallel=true"
        )

    if experts is not None and architecture.bias_linear and parallel.tensor > parallel.expert == 1:
        yield (
            f"{key}={parallel.tensor}: megatron-core does not split experts with biases. Set "
            f"{section}.expert_model_parallel_size to a divisor of {experts} experts, or {key}=1"
        )

    # Expert parallelism.
    key, ranks = f"{section}.expert_model_parallel_size", world_size // parallel.pipeline
    if parallel.expert == 1:
        return
    if experts is None:
        yield f"{key}={parallel.expert}, but the model has no experts. Set it to 1"
        return
    yield from _not_divided(key, parallel.expert, {"experts": experts})
    if ranks % parallel.expert:
        divisors = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
        yield (
            f"{key}={parallel.expert} does not divide the {ranks} processes of a pipeline stage. "
            f"Use one of {', '.join(divisors)}"
        )


def _stage_problems(num_layers: int, parallel: ParallelConfig, section: str) -> Iterator[str]:
    fixed = {
        f"{section}.num_layers_in_{position}_pipeline_stage": layers
        for position, layers in (("first", parallel.first_stage), ("last", parallel.last_stage))
        if layers is not None
    }
    layers, stages = num_layers - sum(fixed.values()), parallel.pipeline - len(fixed)
    key = f"{section}.pipeline_model_parallel_size"
    if not fixed:
        yield from _not_divided(key, stages, {"layers": layers})
        return
    # The other stages need equal numbers of layers, at least one each.
    fits = (stages > 0 and layers >= stages and layers % stages == 0) or stages == layers == 0
    if parallel.pipeline == 1 or not fits:
        sizes = ", ".join(f"{name}={size}" for name, size in fixed.items())
        yield (
            f"{sizes}: {layers} of {num_layers} layers remain for {max(0, stages)} other stages of "
            f"equal size ({key}={parallel.pipeline}). Change the numbers, or set them to null"
        )


def _not_divided(key: str, size: int, counts: dict[str, int]) -> Iterator[str]:
    undivided = {name: count for name, count in counts.items() if count % size}
    if undivided:
        numbers = " and ".join(f"{count} {name}" for name, count in undivided.items())
        common = math.gcd(*counts.values())
        divisors = [divisor for divisor in range(1, common + 1) if common % divisor == 0]
        near = sorted(divisors, key=lambda divisor: (abs(divisor - size), divisor))[:3]
        yield (f"{key}={size} does not divide {numbers}. Use {', '.join(map(str, sorted(near)))}")
