"""The training step that a call belongs to, in the process that drives a run and in its workers."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_step: ContextVar[int] = ContextVar("training step", default=0)


@contextlib.contextmanager
def training_step(step: int) -> Iterator[None]:
    """Attribute errors raised inside the block to step ``step`` of the run.

    The models that find a non-finite number know their own updates only.
    """
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> int:
    """The step at hand; 0 outside of a run."""
    return _step.get()
