"""Parallel layout of a run's processes, and the process groups of its axes."""

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.errors import LayoutError


@dataclass(frozen=True)
class ParallelState:
    """Coordinates of this process on each parallel axis, and its process groups."""

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

    @property
    def layout_in_words(self) -> str:
        """Text such as ``4 processes (tensor 2, data 2)``."""
        return describe_layout(self.config, self.world_size)

    @property
    def is_first_stage(self) -> bool:
        """True if the embedding is on this process."""
        return self.pp_rank == 0

    @cached_property
    def is_last_stage(self) -> bool:
        """True if the final norm and the head are on this process."""
        return self.pp_rank == self.config.pipeline - 1


def describe_layout(config: ParallelConfig, world_size: int) -> str:
    """Return text such as ``4 processes (tensor 2, data 2)``. Run states compare these texts."""
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


def initialize_parallel(
    config: ParallelConfig | None = None, *, seed: int = 1234, timeout_s: float = 600.0
) -> ParallelState:
    """Create the process groups for ``config``, with torchrun's processes or a single process.

    ``timeout_s``: time limit of collectives in seconds. A second call with the same sizes returns
    the same groups. A call with other sizes replaces megatron-core's groups. Raises `LayoutError`
    if the sizes do not divide the number of processes.
    """
    config = config or ParallelConfig()
    timeout = timedelta(seconds=timeout_s)
    accelerator.prepare_megatron()
    accelerator.activate()
    # A launcher describes the processes in the environment. Without it there is one process.
    if not dist.is_initialized():
        single: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        dist.init_process_group(
            accelerator.backend(), timeout=timeout, **({} if is_launched else single)
        )
    # Every axis must divide the processes.
    world_size = dist.get_world_size()
    for axes in (("tensor", "pipeline", "context"), ("pipeline", "expert")):
        sizes = {axis: getattr(config, axis) for axis in axes}
        if world_size % (product := math.prod(sizes.values())):
            factors = " x ".join(f"{axis} ({size})" for axis, size in sizes.items())
            raise LayoutError(
                f"world size {world_size} is not a multiple of {factors} = {product}. Start a "
                f"multiple of {product} processes, or lower one of these sizes"
            )

    from megatron.core import parallel_state, tensor_parallel

    # megatron-core keeps one set of groups per process.
    wanted = (config.tensor, config.pipeline, config.context, config.expert)
    if parallel_state.model_parallel_is_initialized() and wanted != _current_sizes():
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
        world_size=world_size,
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
    )


def joined_parallel(*, sequence_parallel: bool = False) -> ParallelState:
    """Return the process groups that exist. Without any, create them for a single process."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return initialize_parallel()
    return initialize_parallel(ParallelConfig(*_current_sizes(), sequence_parallel))


def _current_sizes() -> tuple[int, int, int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def shutdown_parallel() -> None:
    """Destroy all process groups, if there are any."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for suffix in ("", "_GLOO"):  # groups that megatron-core keeps, with open ports
        setattr(parallel_state, f"_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP{suffix}", None)
    if dist.is_initialized():
        dist.destroy_process_group()
