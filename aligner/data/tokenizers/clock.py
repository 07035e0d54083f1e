"""Time that chat templates read: a run's is fixed when it begins, so that a resume repeats it.

An environment variable holds it, which every process of the run inherits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Self

TEMPLATE_TIME = "ALIGNER_TEMPLATE_TIME"


class RunClock(datetime):
    """A clock that stands at the run's fixed time; without one it tells the present."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """The fixed local time, else the present."""
        fixed = os.environ.get(TEMPLATE_TIME)
        return cls.fromisoformat(fixed) if fixed else super().now(tz)


@contextmanager
def fixed_time(moment: str) -> Iterator[None]:
    """Let templates read ``moment``, local time in ISO format, in the block."""
    os.environ[TEMPLATE_TIME] = moment
    try:
        yield
    finally:
        os.environ.pop(TEMPLATE_TIME, None)
