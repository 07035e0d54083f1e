"""Time for chat templates, fixed at the start of a run, so that a resumed run repeats it.

Every process of the run inherits the time in an environment variable.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Self

TEMPLATE_TIME = "ALIGNER_TEMPLATE_TIME"


class RunClock(datetime):
    """A clock with the run's fixed time, or with the current time if none is fixed."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """Return the fixed local time, or the current time if none is fixed."""
        fixed = os.environ.get(TEMPLATE_TIME)
        return cls.fromisoformat(fixed) if fixed else super().now(tz)


@contextmanager
def fixed_time(moment: str) -> Iterator[None]:
    """Fix the time of templates in the block to ``moment``, a local time in ISO format."""
    os.environ[TEMPLATE_TIME] = moment
    try:
        yield
    finally:
        os.environ.pop(TEMPLATE_TIME, None)
