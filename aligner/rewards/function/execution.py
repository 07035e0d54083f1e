"""Calls a reward function, and searches for the sample on which the function fails.

The code runs in a child process (`aligner.child_process`). A message is a `Samples`. The answer is
``"scores", [{"reward": number, metric: number}, ...]``, or ``"raised", text`` and then
``"culprit", index or None``. The module imports neither torch nor numpy, to start quickly.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aligner.child_process import Answers
from aligner.errors import AlignerError
from aligner.importing import describe_exception, load_function
from aligner.rewards.forms import of_form
from aligner.rewards.protocol import Samples, Signature, parse_scores

Scored = tuple[list[float], dict[str, list[float]]]

# Maximum number of single samples in the search after a batch has failed.
_MAX_SEARCHED = 256


def load(name: str, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[..., Answers]]:
    """Import function ``name``. Return its `Signature` as a dict, and `LoadedFunction.answers`."""
    function = LoadedFunction(load_function(name, key="reward.function"), name, kwargs)
    return vars(function.signature), function.answers


class LoadedFunction:
    """A reward function with its kwargs, ready to be called."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``. Raises `ConfigError` unless `aligner.rewards.protocol` is followed."""
        form, self._function = of_form(function, functools.partial(function, **kwargs))
        signature = Signature.of(function if form is None else self._function, name, kwargs)
        self.signature = replace(signature, form="" if form is None else form.name)
        self._kwargs = frozenset(kwargs)
        self._runner = asyncio.Runner()  # one loop for all calls, as the function may keep objects

    def score(self, samples: Samples) -> Scored:
        """Call the function, which may be async. Return rewards and metrics, see `parse_scores`."""
        columns = self.signature.select(samples.columns, self._kwargs)
        lists = [samples.prompts, samples.responses, samples.ground_truths]
        if self.signature.lists == 2:
            columns["ground_truths"] = lists.pop()
        result = self._function(*lists, **columns)
        if inspect.isawaitable(result):
            result = self._runner.run(asyncio.wait_for(result, None))
        return parse_scores(result, samples, self.signature.name)

    def answers(self, samples: Samples) -> Answers:
        """Yield ("scores", a dict per sample), or ("raised", text) and ("culprit", index)."""
        try:
            rewards, metrics = self.score(samples)
        except (SystemExit, AlignerError):
            raise
        except BaseException as error:
            yield "raised", describe_exception(error)
            # The search comes after the answer, as it may take long or hang.
            yield "culprit", self.find_failing(samples, error)
        else:
            rows = zip(rewards, *metrics.values(), strict=True)
            yield "scores", [dict(zip(["reward", *metrics], row, strict=True)) for row in rows]

    def find_failing(self, samples: Samples, error: BaseException) -> int | None:
        """Score samples one by one. Return the index of the first that raises ``error``'s type.

        Returns None if no sample raises this type, or if all samples do.
        """
        culprit, has_other_results = None, len(samples) == 1
        for index in range(min(len(samples), _MAX_SEARCHED)):
            try:
                self.score(samples.slice(index, index + 1))
                has_other_results = True
            except BaseException as sample_error:
                if type(sample_error) is not type(error):
                    has_other_results = True
                elif culprit is None:
                    culprit = index
            # A sample is only the cause if another sample succeeds or fails differently.
            if has_other_results and culprit is not None:
                return culprit
        return None
