"""The tiny recipe's reward, slowly: a step that lasts can be killed anywhere in it."""

import time
from typing import Any

from aligner.rewards import regex_format


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    *,
    pattern: str,
    seconds: float = 0.0,
) -> Any:
    """Return `aligner.rewards.regex_format.reward` after ``seconds``."""
    time.sleep(seconds)
    return regex_format.reward(prompts, responses, ground_truths, pattern=pattern)
