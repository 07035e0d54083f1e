"""Where rewards come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.config.fields import Count, Positive


@dataclass(frozen=True)
class RewardConfig:
    """A Python function ``reward(prompts, responses, ground_truths, **columns)``.

    It returns one float per sample, or one dict per sample with at least ``reward``.
    """

    function: str  # package.module:function or path/to/file.py:function
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of it
    time_limit_s: Positive = 60.0  # for one whole batch
    max_concurrency: Count = 1  # parts of a batch scored at the same time, each in a process
