"""Protocol of a reward function: its arguments and its result.

``def reward(prompts, responses, ground_truths, **columns) -> list[float] | list[dict]``, plain or
``async def``. All arguments are lists with one entry per sample:

* ``prompts``: prompt text as the model saw it, with the chat template applied.
* ``responses``: response text without the end-of-sequence token.
* ``ground_truths``: the data's ground truths, None if the data has none. A function with two
  positional parameters gets them by keyword.
* ``columns``: keyword arguments. They are the other columns of the data, and the trainer's
  ``is_end`` (bool: the response ended with EOS or a stop string) and ``response_lengths`` (int, in
  tokens). A function gets the columns that its signature names, or all with ``**columns``. The
  values of ``reward.kwargs`` are also keyword arguments. They override columns.

The function returns one number per sample, finite in float32, or one dict per sample with
``"reward"`` and additional metrics. All dicts have the same keys.

Functions in the forms of other libraries are adapted to this contract (`aligner.rewards.forms`).

Every reward process loads this module and :mod:`aligner.rewards.function.execution`, so they import
neither torch nor numpy.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import ConfigError, DataError, RewardError
from aligner.plain import as_float32


@dataclass(frozen=True)
class Signature:
    """Parameters of a reward function."""

    name: str  # path of the function
    named: tuple[str, ...]  # keyword parameters, which take columns
    required: tuple[str, ...]  # those of ``named`` without a default
    takes_all: bool  # whether the function has **columns
    first: tuple[str, ...] = ()  # positional parameters. A column cannot have their names.
    lists: int = 3  # number of positional lists. 2 means that ground truths are passed by keyword.
    form: str = ""  # name of the library whose form the function has (`aligner.rewards.forms`)

    @classmethod
    def of(
        cls, function: Callable[..., Any], name: str, kwargs: Collection[str] = ()
    ) -> "Signature":
        """Inspect the parameters of ``function``.

        ``name``: the function's path. ``kwargs``: names of keyword arguments that every call has.
        Raises `ConfigError` if the function lacks the positional parameters, or a keyword parameter
        for one of ``kwargs``.
        """
        # The lists are two or three positional parameters. With two, ground truths are a keyword.
        parameters = list(inspect.signature(function).parameters.values())
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        has_args = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        truths_by_keyword = takes_all or any(p.name == "ground_truths" for p in keyword)
        lists = 2 if len(positional) == 2 and truths_by_keyword and not has_args else 3
        if len(positional) < lists and not has_args:
            raise ConfigError(
                f"reward function {name!r} must take (prompts, responses, ground_truths, "
                f"**columns), but its signature is {inspect.signature(function)}"
            )
        # The other parameters are keywords. Check that they accept ``kwargs``.
        keyword += positional[lists:]
        keyword_names = {p.name for p in keyword}
        first = tuple(p.name for p in positional[:lists] if p.kind is p.POSITIONAL_OR_KEYWORD)
        refused = sorted(set(kwargs) & set(first) if takes_all else set(kwargs) - keyword_names)
        if refused:
            raise ConfigError(
                f"reward.kwargs contains {refused}, which function {name!r} does not accept as "
                f"keyword arguments. It accepts {sorted(keyword_names)}. Remove or rename the keys"
            )
        # Keyword parameters without a value get columns of the data.
        passed = {*kwargs, "ground_truths"} if lists == 2 else set(kwargs)
        columns = [p for p in keyword if p.name not in passed]
        named = tuple(p.name for p in columns)
        required = tuple(p.name for p in columns if p.default is p.empty)
        return cls(name, named, required, takes_all, first, lists)

    def check_columns(self, available: Collection[str]) -> None:
        """Raise `DataError` if ``available`` lacks a required column or has a positional name."""
        problem = ""
        if repeated := [name for name in self.first if self.takes_all and name in available]:
            problem = (
                f"has the positional parameters {repeated}, and **columns would pass the data's "
                "columns of the same names. Rename the parameters, or write "
                "def f(prompts, responses, ground_truths, /, **columns)"
            )
        elif missing := [name for name in self.required if name not in available]:
            problem = f"needs the columns {missing}, which the data does not have; columns found: "
            problem += f"{sorted(available)}. Add the columns, or give the parameters defaults"
        if problem:
            raise DataError(f"reward function {self.name!r} {problem}")

    def select(self, columns: Mapping[str, list[Any]], kwargs: Collection[str]) -> dict[str, Any]:
        """Return the ``columns`` that the function gets, except those that ``kwargs`` override."""
        self.check_columns(columns)
        return {
            name: values
            for name, values in columns.items()
            if name not in kwargs and (self.takes_all or name in self.named)
        }


@dataclass(frozen=True)
class Samples:
    """The arguments of a reward function for ``B`` samples."""

    prompts: list[str]
    responses: list[str]
    ground_truths: list[Any]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    offset: int = 0  # index of the first sample in the batch

    def __post_init__(self) -> None:
        lists = {"responses": self.responses, "ground_truths": self.ground_truths, **self.columns}
        for name, values in lists.items():
            if len(values) != len(self.prompts):
                raise RewardError(
                    f"{name} has {len(values)} entries for {len(self.prompts)} prompts. Give one "
                    "entry per prompt"
                )

    def __len__(self) -> int:
        return len(self.prompts)

    def slice(self, start: int, stop: int) -> "Samples":
        """Return the samples ``start`` to ``stop - 1``."""
        part, offset = slice(start, stop), self.offset + start
        columns = {name: values[part] for name, values in self.columns.items()}
        prompts, responses, truths = self.prompts, self.responses, self.ground_truths
        return Samples(prompts[part], responses[part], truths[part], columns, offset)

    def describe(self, index: int) -> str:
        """Describe a sample in a message: index, end of the prompt, start of the response."""
        prompt, response = self.prompts[index], self.responses[index]
        tail = prompt if len(prompt) <= 80 else "…" + prompt[-80:]
        head = response if len(response) <= 80 else response[:80] + "…"
        return f"sample {self.offset + index} (prompt {tail!r}, response {head!r})"


def parse_scores(
    scores: Any, samples: Samples, name: str
) -> tuple[list[float], dict[str, list[float]]]:
    """Check the result ``scores`` of the function ``name``. Return rewards and metrics.

    Rewards and each metric are lists with one number per sample. Raises `RewardError` for a wrong
    number of scores, a score that is not finite in float32, or dicts with different keys.
    """
    scores = scores.tolist() if hasattr(scores, "tolist") else scores  # arrays and tensors
    problem = ""
    if not isinstance(scores, list | tuple):
        problem = f"must return a list of numbers or of dicts, got {type(scores).__name__}"
    elif len(scores) != len(samples):
        problem = f"returned {len(scores)} rewards for {len(samples)} samples"
    if problem:
        raise RewardError(f"reward function {name!r} {problem}")
    # Column by column, with the keys of the first sample.
    with_keys = bool(scores) and isinstance(scores[0], Mapping)
    keys = set(scores[0]) if with_keys else {"reward"}
    table: dict[str, list[float]] = {str(key): [] for key in ["reward", *sorted(keys, key=str)]}
    for index, score in enumerate(scores):
        source = f"reward function {name!r}, {samples.describe(index)}"
        for key, value in _as_items(score, keys, with_keys, source):
            table[key].append(as_float32(value, f"{source}: {key}", RewardError))
    rewards = table.pop("reward")
    return rewards, table


def _as_items(score: Any, keys: set[str], with_keys: bool, source: str) -> list[tuple[str, Any]]:
    if isinstance(score, Mapping) != with_keys:
        problem = "numbers and dicts are mixed. Return one kind for all samples"
    elif not isinstance(score, Mapping):
        return [("reward", score)]
    elif "reward" not in score:
        problem = f"the dict has no key 'reward', only {sorted(score, key=str)}. Add the key"
    elif invalid := [key for key in score if not isinstance(key, str)]:
        problem = f"the key {invalid[0]!r} is not text. Use text as the key"
    elif set(score) != keys:
        expected = sorted(keys, key=str)
        problem = f"the dict has the keys {sorted(score)}, the first sample's has {expected}. "
        problem += "Return the same keys for all samples"
    else:
        return list(score.items())
    raise RewardError(f"{source}: {problem}")
