"""Collectives of small Python objects over all processes of the run."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def this_rank() -> int:
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Return whether this process is the one that writes files and prints."""
    return this_rank() == 0


def from_rank_zero(value: T) -> T:
    """Rank 0's ``value`` on every rank; a small picklable object."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on at least one rank."""
    return any(gather_objects(flag))


def on_rank_zero(action: Callable[[], T]) -> T:
    """Return on every rank the result of ``action`` on rank 0; its error is raised everywhere.

    For work with side effects, or that must not be done twice. The result must be picklable.
    """
    own: tuple[T | None, Exception | None] = (None, None)
    if is_rank_zero():
        try:
            own = (action(), None)
        except Exception as error:
            own = (None, error)
    result, failure = from_rank_zero(own)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def gather_objects(mine: T) -> list[T]:
    """``mine`` of every rank, in order of ranks; small picklable objects."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
