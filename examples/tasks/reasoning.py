"""Prompts and verifiers of the procedural tasks in the package reasoning-gym."""

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
        seed: seed of the task. Use different seeds for training and validation.
        prefix: text before each question.
        suffix: text after each question, such as instructions for the format of the answer.
        options: other settings of the task.

    Score the responses with `reward`.
    """
    import reasoning_gym  # takes seconds

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
    """Return the score of the task's verifier, from 0 to 1.

    Args:
        prompts: ignored.
        responses: text without the end-of-sequence token.
        ground_truths: ignored, because an entry may have several right answers.
        task: name of each sample's task.
        entry: reasoning-gym's entry of each prompt.
        answer_tag: read the answer from the last ``<answer_tag>...</answer_tag>``, and score 0
            without the tag. None means the response without surrounding blanks.

    Returns:
        ``reward``, ``accuracy`` (1 for a reward of 1), and ``well_formed`` (1 if there is an
        answer).
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
    answers = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
    return answers[-1].strip() if answers else None
