"""Process groups of every axis of the layout.

`initialize_parallel` starts torch.distributed (from torchrun's environment, or for this process
only, without a port) and megatron-core's model-parallel groups, and returns them as one value that
is passed on explicitly.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.errors import LayoutError


@dataclass(frozen=True)
class ParallelState:
    """This process's place in the layout, and its process groups."""

    config: ParallelConfig
    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    model_parallel_group: dist.ProcessGroup

    @property
    def layout_in_words(self) -> str:
        """See `describe_layout`."""
        return describe_layout(self.config, self.world_size)

    @property
    def is_first_stage(self) -> bool:
        """True if this process holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this process holds the final norm and the head."""
        return self.pp_rank == self.config.pipeline - 1


def describe_layout(config: ParallelConfig, world_size: int) -> str:
    """Number of processes and size of every axis, which decide the state that each rank holds."""
    sizes = {
        "tensor": config.tensor,
        "pipeline": config.pipeline,
        "context": config.context,
        "expert": config.expert,
        "data": config.data_size(world_size),
    }
    split = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    count = f"{world_size} process" + ("es" if world_size > 1 else "")
    return f"{count} ({split})" if split else count


def _start_torch_distributed(timeout: timedelta) -> None:
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(accelerator.backend(), timeout=timeout)
    else:
        dist.init_process_group(
            accelerator.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def initialize_parallel(
    config: ParallelConfig | None = None, *, seed: int = 1234, timeout_s: float = 600.0
) -> ParallelState:
    """Start (or join) the process groups for ``config``.

    Calling it again with the same sizes returns the same groups; with other sizes megatron-core's
    groups are made anew. Raises `LayoutError` when the world size is not a multiple of the
    model-parallel size.
    """
    config = config or ParallelConfig()
    timeout = timedelta(seconds=timeout_s)
    accelerator.prepare_megatron()
    accelerator.activate()
    _start_torch_distributed(timeout)

    world = dist.get_world_size()
    _check_world(config, world)

    from megatron.core import parallel_state, tensor_parallel

    sizes = (config.tensor, config.pipeline, config.context, config.expert)
    if parallel_state.model_parallel_is_initialized() and sizes != _current_sizes():
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=1 if config.expert > 1 else None,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ParallelState(
        config=config,
        rank=dist.get_rank(),
        world_size=world,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        model_parallel_group=parallel_state.get_model_parallel_group(),
    )


def _check_world(config: ParallelConfig, world: int) -> None:
    """Refuse a world that the axes do not divide."""
    if world % config.model_parallel_size:
        raise LayoutError(
            f"world size {world} is not a multiple of tensor ({config.tensor}) x pipeline "
            f"({config.pipeline}) x context ({config.context}) = {config.model_parallel_size}; "
            f"start a multiple of {config.model_parallel_size} processes or make an axis smaller"
        )
    if world % (config.pipeline * config.expert):
        raise LayoutError(
            f"world size {world} is not a multiple of pipeline ({config.pipeline}) x expert "
            f"({config.expert}) = {config.pipeline * config.expert}; start a multiple of it or "
            "make an axis smaller"
        )


def joined_parallel(*, sequence_parallel: bool = False) -> ParallelState:
    """The groups that this process has joined; one process's own where it has joined none."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return initialize_parallel()
    tensor, pipeline, context, expert = _current_sizes()
    return initialize_parallel(ParallelConfig(tensor, pipeline, context, expert, sequence_parallel))


def _current_sizes() -> tuple[int, int, int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def shutdown_parallel() -> None:
    """Destroy all process groups; safe to call when none were started."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
