"""Call a reward function on some samples and find the sample it fails on."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aligner.importing import load_function
from aligner.rewards.protocol import Samples, Signature, parse_scores

Scored = tuple[list[float], dict[str, list[float]]]

# A function that failed on a batch is tried on this many single samples to find the culprit.
_MOST_TRIED = 256


class LoadedFunction:
    """A reward function with its kwargs, ready to be called."""

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        """Bind ``kwargs``; refuses a signature that does not fit."""
        self.signature = Signature.of(function, name, kwargs)
        self._function = functools.partial(function, **kwargs)
        self._kwargs = frozenset(kwargs)

    @classmethod
    def load(cls, name: str, kwargs: Mapping[str, Any]) -> "LoadedFunction":
        """Import the function that ``reward.function`` names."""
        return cls(load_function(name, key="reward.function"), name, kwargs)

    def score(self, samples: Samples, *, limit_s: float | None = None) -> Scored:
        """Call the function, wait if it is async, and check what it returned.

        ``limit_s`` cancels an async function; a sync one cannot be stopped from within.
        """
        result = self._function(
            samples.prompts,
            samples.responses,
            samples.ground_truths,
            **self.signature.select(samples.columns, self._kwargs),
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result, limit_s))
        return parse_scores(result, samples, self.signature.name)

    def find_failing(self, samples: Samples) -> int | None:
        """Index of the first sample that fails by itself; None if none of those tried does."""
        for index in range(min(len(samples), _MOST_TRIED)):
            try:
                self.score(samples.slice(index, index + 1))
            except BaseException:
                return index
        return None


def failure_message(name: str, raised: str, samples: Samples, culprit: int | None) -> str:
    """Message that ``name`` raised, and on which sample."""
    where = "the batch as a whole; no single sample was found to cause it"
    if culprit is not None:
        where = samples.describe(culprit)
    return f"reward function {name!r} raised {raised} on {where}"


async def _wait(awaitable: Awaitable[Any], limit_s: float | None) -> Any:
    return await asyncio.wait_for(awaitable, limit_s)
