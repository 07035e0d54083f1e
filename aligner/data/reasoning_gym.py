"""Prompts of the procedural tasks in the package reasoning-gym."""

from collections.abc import Iterator
from typing import Any

from aligner.errors import ConfigError


def reasoning_gym_prompts(
    task: str,
    size: int = 1024,
    seed: int = 0,
    *,
    prefix: str = "",
    suffix: str = "",
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows with the columns prompt, ground_truth, task, entry.

    Args:
        task: a name in reasoning-gym's registry, such as ``basic_arithmetic``.
        size: number of rows.
        seed: of the task; give validation prompts another one.
        prefix: written before each question.
        suffix: written after it, such as instructions for the format of the answer.
        options: further settings of the task.

    Score the responses with ``aligner.rewards.reasoning_gym:reward``.
    """
    import reasoning_gym  # some seconds

    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym task {task!r} with {options}: {error}") from error
    for index in range(size):
        entry = dataset[index]
        yield {
            "prompt": f"{prefix}{entry['question']}{suffix}",
            "ground_truth": entry["answer"],
            "task": task,
            "entry": entry,
        }
