"""Index of the current training step, in the driver of a run and in its workers."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_step: ContextVar[int] = ContextVar("training step", default=0)


@contextlib.contextmanager
def training_step(step: int) -> Iterator[None]:
    """Attribute errors raised inside the block to step ``step`` of the run.

    The models cannot name the step, because they count only their own updates.
    """
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> int:
    """Return the current step, 0 outside of a run."""
    return _step.get()
