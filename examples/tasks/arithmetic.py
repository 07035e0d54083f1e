"""A procedural few-shot arithmetic task with a verifiable reward.

A prompt shows a few solved problems and the question of the next one::

    2+3=5
    7+4=11
    12+9=

and the response is right when it is exactly ``21``, ended by a newline or the end-of-sequence
token (:mod:`aligner.examples.tasks.exact_number`).

* Training and validation *problems* are disjoint. A problem and its mirror image (``3+4`` and
  ``4+3``) are always in the same split, so that commutativity reveals no validation problem.
* The solved examples are different training problems. None is the problem in question or its mirror
  image, or has the same answer, so that copying an example is never right.
* Row ``i`` depends only on (seed, split, i), not on the number of rows.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from aligner.errors import ConfigError

Split = Literal["train", "validation"]

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_COMMUTATIVE = frozenset("+*")


class Problem(NamedTuple):
    """A problem ``a operator b``."""

    a: int
    operator: str
    b: int

    @property
    def answer(self) -> int:
        """Value of the problem."""
        return _OPERATORS[self.operator](self.a, self.b)

    @property
    def canonical(self) -> "Problem":
        """The problem or its mirror image, the same for both."""
        if self.operator in _COMMUTATIVE and self.b < self.a:
            return Problem(self.b, self.operator, self.a)
        return self


def arithmetic_prompts(
    split: Split = "train",
    size: int = 4096,
    *,
    seed: int = 0,
    low: int = 0,
    high: int = 12,
    operators: Sequence[str] = ("+",),
    shots: int = 2,
    validation_fraction: float = 0.25,
    question: str = "{a}{operator}{b}=",
    answer: str = "{answer}",
    separator: str = "\n",
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows with the columns prompt, ground_truth, a, b, operator.

    Args:
        split: ``train`` or ``validation``, whose problems are disjoint.
        size: number of rows. All problems of the split occur once before a problem is repeated,
            each time with new examples.
        seed: seed of the split, the order of problems and the examples.
        low: smallest operand.
        high: largest operand (included).
        operators: any of ``+``, ``-``, ``*``. Differences are never negative.
        shots: solved examples before the question.
        validation_fraction: share of the problems that are held out.
        question: template of a question, at whose end the response begins.
        answer: template of an answer in the solved examples.
        separator: text between problems.

    ``ground_truth`` is the plain decimal answer, independent of ``answer``.
    """
    pools = split_problems(
        seed=seed, low=low, high=high, operators=operators, validation_fraction=validation_fraction
    )
    if split not in pools:
        raise ConfigError(f"arithmetic: split={split!r} must be one of {', '.join(pools)}")
    if shots < 0 or size < 1:
        raise ConfigError(f"arithmetic: shots={shots} must be >= 0 and size={size} >= 1")
    for index, problem in enumerate(_ask_in_turn(pools[split], size, f"{seed}/{split}")):
        # A generator per row, so that a row does not depend on the others.
        rng = random.Random(f"{seed}/{split}/row/{index}")
        examples = _sample_examples(problem, pools["train"], shots, rng)
        solved = [_write(question + answer, example) for example in examples]
        yield {
            "prompt": separator.join([*solved, _write(question, problem)]),
            "ground_truth": str(problem.answer),
            "a": problem.a,
            "b": problem.b,
            "operator": problem.operator,
        }


def arithmetic_examples(**arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt and response; arguments as in `arithmetic_prompts`."""
    for row in arithmetic_prompts(**arguments):
        yield {"prompt": row["prompt"], "response": row["ground_truth"]}


def arithmetic_pairs(
    *, wrong_by: Sequence[int] = (1, 9), **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt, chosen and rejected: a right and a wrong answer.

    The other arguments are those of `arithmetic_prompts`. The wrong answer differs by
    ``wrong_by[0]`` to ``wrong_by[1]``, is never negative, and depends only on (seed, split, row).
    """
    nearest, farthest = wrong_by
    if not 1 <= nearest <= farthest:
        raise ConfigError(
            f"arithmetic: wrong_by={list(wrong_by)} must be two numbers, 1 <= first <= second"
        )
    key = f"{arguments.get('seed', 0)}/{arguments.get('split', 'train')}"
    for index, row in enumerate(arithmetic_prompts(**arguments)):
        right = int(row["ground_truth"])
        steps = [step for step in range(-farthest, farthest + 1) if abs(step) >= nearest]
        answers = [right + step for step in steps if right + step >= 0]
        wrong = random.Random(f"{key}/wrong/{index}").choice(answers)
        yield {"prompt": row["prompt"], "chosen": str(right), "rejected": str(wrong)}


def arithmetic_labels(**arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt, response and label, alternately right and wrong answers.

    The arguments are those of `arithmetic_pairs`.
    """
    for index, row in enumerate(arithmetic_pairs(**arguments)):
        is_right = index % 2 == 0
        response = row["chosen" if is_right else "rejected"]
        yield {"prompt": row["prompt"], "response": response, "label": is_right}


def split_problems(
    *, seed: int, low: int, high: int, operators: Sequence[str], validation_fraction: float
) -> dict[str, list[Problem]]:
    """Split all problems of the range into ``train`` and ``validation`` by canonical form."""
    # Arguments.
    if not 0 <= low <= high:
        raise ConfigError(f"arithmetic: needs 0 <= low <= high, got low={low}, high={high}")
    unknown = [operator for operator in operators if operator not in _OPERATORS]
    if unknown or not operators:
        raise ConfigError(f"arithmetic: operators={list(operators)} must be among + - *")
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"arithmetic: validation_fraction={validation_fraction} must lie between 0 and 1"
        )

    # Problems and split.
    problems = [
        problem
        for operator in dict.fromkeys(operators)
        for a in range(low, high + 1)
        for b in range(low, high + 1)
        if (problem := Problem(a, operator, b)).answer >= 0
    ]
    canonical = sorted({problem.canonical for problem in problems})
    held_out_count = round(validation_fraction * len(canonical))
    if not 0 < held_out_count < len(canonical):
        raise ConfigError(
            f"arithmetic: {len(canonical)} different problems cannot be split with "
            f"validation_fraction={validation_fraction}. Widen low..high"
        )
    held_out = set(random.Random(f"{seed}/split").sample(canonical, held_out_count))
    return {
        "train": [problem for problem in problems if problem.canonical not in held_out],
        "validation": [problem for problem in problems if problem.canonical in held_out],
    }


def _ask_in_turn(problems: list[Problem], size: int, key: str) -> Iterator[Problem]:
    """Yield ``size`` problems in rounds of all problems, each round in a different order."""
    order: list[Problem] = []
    for index in range(size):
        round_index, position = divmod(index, len(problems))
        if position == 0:
            order = random.Random(f"{key}/round/{round_index}").sample(problems, len(problems))
        yield order[position]


def _sample_examples(
    question: Problem, pool: list[Problem], shots: int, rng: random.Random
) -> list[Problem]:
    """Sample different problems that reveal neither the problem in question nor its answer."""
    chosen: dict[Problem, Problem] = {}
    for problem in _shuffled(pool, rng):
        if len(chosen) == shots:
            break
        if problem.answer != question.answer:
            chosen.setdefault(problem.canonical, problem)
    if len(chosen) < shots:
        raise ConfigError(
            f"arithmetic: shots={shots} but only {len(chosen)} training problems have an answer "
            f"other than {question.answer}. Widen low..high or lower shots"
        )
    return list(chosen.values())


def _shuffled(pool: list[Problem], rng: random.Random) -> Iterator[Problem]:
    """Yield ``pool`` in random order (Fisher-Yates, evaluated lazily)."""
    moved: dict[int, int] = {}
    for index in range(len(pool)):
        picked = rng.randrange(index, len(pool))
        yield pool[moved.get(picked, picked)]
        moved[picked] = moved.get(index, index)


def _write(template: str, problem: Problem) -> str:
    return template.format(
        a=problem.a, b=problem.b, operator=problem.operator, answer=problem.answer
    )
