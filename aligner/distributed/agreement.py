"""Small agreements between all processes of the run."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Whether this process is the one that writes files and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_zero(value: T) -> T:
    """Rank 0's ``value`` on every rank; a small picklable object."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on at least one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)
