"""Parallel layouts: what they are and which ones a model and a world size admit."""

import math
from dataclasses import dataclass
from typing import Literal

from aligner.architecture import GPTArchitecture
from aligner.errors import LayoutError

LayerSpec = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True)
class LayerOptions:
    """Choice of layer implementations; none of it is in a checkpoint."""

    spec: LayerSpec = "auto"
    fusions: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the model-parallel axes; what remains of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    first_stage: int | None = None  # layers of the first pipeline stage; None: as the ones between
    last_stage: int | None = None

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica of the model (expert parallelism lives inside DP)."""
        return self.tensor * self.pipeline * self.context

    @property
    def sequence_multiple(self) -> int:
        """Tokens of a sequence are padded to a multiple of it, so that it can be cut in chunks.

        Context parallelism gives every rank two chunks of each sequence.
        """
        return 2 * self.context if self.context > 1 else 1

    def row_multiple(self, sequence_length_round: int = 1) -> int:
        """Lengths that the model runs at on one context-parallel rank are multiples of it.

        Sequence parallelism shares a row out over the tensor-parallel ranks;
        ``sequence_length_round`` is what dynamic batching asks for.
        """
        shares = self.tensor if self.sequence_parallel else 1
        return math.lcm(shares, sequence_length_round)

    def data_size(self, world_size: int) -> int:
        """Data-parallel size in a world of ``world_size`` processes."""
        return world_size // self.model_parallel_size


def check_layout(
    architecture: GPTArchitecture, parallel: ParallelConfig, world_size: int, section: str = "model"
) -> None:
    """Refuse a layout that cannot work, with the numbers and the nearest that can.

    ``section``: where it stands in the configuration.
    """
    size = parallel.model_parallel_size
    if world_size % size:
        raise LayoutError(
            f"{world_size} processes cannot be split into tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline} x context {parallel.context} = {size}; start "
            f"{_multiples(size, world_size)} processes (trainer.devices x "
            "trainer.num_nodes) or change the sizes"
        )
    _check_tensor(architecture, parallel, section)
    _check_stages(architecture, parallel, section)
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise LayoutError(
            f"{section}.sequence_parallel=true needs {section}.tensor_model_parallel_size > 1, "
            "got 1; set it to false or raise the tensor parallel size"
        )
    _check_expert(architecture, parallel, world_size, section)
    is_moe = architecture.num_moe_experts is not None
    if is_moe and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise LayoutError(
            f"{section}.tensor_model_parallel_size={parallel.tensor} with a mixture of experts "
            f"needs {section}.sequence_parallel=true, got false; megatron-core does not train it "
            "otherwise"
        )


def _check_stages(architecture: GPTArchitecture, parallel: ParallelConfig, section: str) -> None:
    given = {
        f"{section}.num_layers_in_{place}_pipeline_stage": layers
        for place, layers in (("first", parallel.first_stage), ("last", parallel.last_stage))
        if layers is not None
    }
    rest, others = architecture.num_layers - sum(given.values()), parallel.pipeline - len(given)
    key = f"{section}.pipeline_model_parallel_size"
    if not given:
        return _divides(key, others, {"layers": rest})
    fits = rest >= others and rest % others == 0 if others > 0 else rest == others == 0
    if parallel.pipeline == 1 or not fits:
        sizes = ", ".join(f"{name}={layers}" for name, layers in given.items())
        raise LayoutError(
            f"{sizes}: of {architecture.num_layers} layers {rest} are left for the other "
            f"{max(0, others)} stages, which have equal numbers of them ({key}="
            f"{parallel.pipeline}); change the numbers, or set them to null"
        )
    return None


def _check_tensor(architecture: GPTArchitecture, parallel: ParallelConfig, section: str) -> None:
    counts = {
        "attention heads": architecture.num_attention_heads,
        "query groups": architecture.num_query_groups,
        "hidden columns": architecture.hidden_size,
    }
    if architecture.num_moe_experts is None:
        counts["feed-forward columns"] = architecture.ffn_hidden_size
    elif parallel.expert == 1:  # experts are split like other layers; shared out, they are whole
        counts["expert columns"] = architecture.expert_ffn_hidden_size
    _divides(f"{section}.tensor_model_parallel_size", parallel.tensor, counts)


def _check_expert(
    architecture: GPTArchitecture, parallel: ParallelConfig, world_size: int, section: str
) -> None:
    if parallel.expert == 1:
        return
    key = f"{section}.expert_model_parallel_size"
    if architecture.num_moe_experts is None:
        raise LayoutError(f"{key}={parallel.expert}, but the model has no experts; set it to 1")
    _divides(key, parallel.expert, {"experts": architecture.num_moe_experts})
    ranks = world_size // parallel.pipeline
    if ranks % parallel.expert:
        raise LayoutError(
            f"{key}={parallel.expert} does not divide the {ranks} processes of a pipeline stage; "
            f"use one of {_divisors(ranks)}"
        )


def _divides(key: str, size: int, counts: dict[str, int]) -> None:
    bad = {name: count for name, count in counts.items() if count % size}
    if not bad:
        return
    numbers = " and ".join(f"{count} {name}" for name, count in bad.items())
    working = [
        candidate
        for candidate in range(1, max(counts.values()) + 1)
        if all(count % candidate == 0 for count in counts.values())
    ]
    near = sorted(working, key=lambda candidate: (abs(candidate - size), candidate))[:3]
    raise LayoutError(
        f"{key}={size} does not divide {numbers}; nearest that work: "
        f"{', '.join(str(candidate) for candidate in sorted(near))}"
    )


def _multiples(step: int, near: int) -> str:
    below, above = near // step * step, (near // step + 1) * step
    return f"{below} or {above}" if below else str(above)


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
