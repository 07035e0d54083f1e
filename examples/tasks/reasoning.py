"""The procedural tasks in the package reasoning-gym: their prompts and their verifiers."""

import re
from collections.abc import Iterator
from typing import Any

from aligner.errors import ConfigError
from aligner.packages import require_extra

require_extra("tasks", "aligner.examples.tasks.reasoning")


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
        seed: of the task. Give validation prompts another one.
        prefix: written before each question.
        suffix: written after it, such as instructions for the format of the answer.
        options: further settings of the task.

    Score the responses with `reward`.
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


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    task: list[str],
    entry: list[dict[str, Any]],
    *,
    answer_tag: str | None = None,
) -> list[dict[str, float]]:
    """The verdict of the task's own verifier, from 0 to 1.

    Args:
        prompts: not looked at.
        responses: text without the end-of-sequence token.
        ground_truths: not looked at; the entry holds more than one right answer may be.
        task: name of each sample's task.
        entry: what reasoning-gym made the prompt from.
        answer_tag: take the answer from the last ``<answer_tag>...</answer_tag>``, and give
            nothing where there is none; None takes the whole response without outer blanks.

    Returns:
        ``reward``; ``accuracy``, 1 where the reward is full; ``well_formed``, an answer was found.
    """
    from reasoning_gym import get_score_answer_fn

    scores = []
    for response, name, source in zip(responses, task, entry, strict=True):
        answer = _extract(response, answer_tag)
        score = 0.0 if answer is None else float(get_score_answer_fn(name)(answer, source))
        scores.append(
            {
                "reward": score,
                "accuracy": float(score >= 1.0),
                "well_formed": float(answer is not None),
            }
        )
    return scores


def _extract(response: str, tag: str | None) -> str | None:
    if tag is None:
        return response.strip() or None
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
    return found[-1].strip() if found else None
