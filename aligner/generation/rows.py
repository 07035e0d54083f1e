"""Rows of requests to a policy, and the progress of their answers.

A request becomes one row per answer. Rows with the same sampling options are generated together,
also rows of different requests.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from aligner.config import LengthParams, SamplingOptions
from aligner.environments.pool import Failure
from aligner.http.queue import Job

EndKind = Literal["stop", "length"]


class Progress(NamedTuple):
    """New tokens of a row."""

    row: int
    ids: list[int]
    logprobs: list[float]  # one per token
    end: EndKind | None = None  # None while more tokens follow
    kept_ids: Tensor | None = None  # int32 [n, K]: ids that top-k and top-p kept, if recorded


@dataclass
class Row:
    """One requested answer."""

    prompt: list[int]
    sample_id: int  # determines the engine's random numbers
    options: SamplingOptions | None  # None: options of the engine
    request: int | None = None  # index of the request in its session

    @property
    def longest(self) -> int:
        """Maximum number of new tokens."""
        return sys.maxsize if self.options is None else self.options.length.max_length


@dataclass
class RowJob(Job[Row]):
    """The rows of one request. ``failure`` is set if the engine failed."""

    failure: Failure | None = None

    @property
    def is_open(self) -> bool:
        """True while the client waits for the engine."""
        return not self.is_abandoned and self.failure is None and self.ended < len(self.items)


def fit_together(rows: Sequence[Row], positions: int) -> bool:
    """Return whether the last of ``rows`` can join the others in one batch.

    The longest prompt and the longest answer together must fit into the model's ``positions``.
    """
    first, last = rows[0].options, rows[-1].options
    if first is None or last is None:
        return first is last
    if (last.sampling, last.length.min_length) != (first.sampling, first.length.min_length):
        return False
    return max(len(row.prompt) for row in rows) + max(row.longest for row in rows) <= positions


def batch_options(rows: Sequence[Row]) -> SamplingOptions | None:
    """Return sampling options for a batch of ``rows``. None: the engine's own options."""
    first = rows[0].options if rows else None
    if first is None:
        return None
    longest = max(row.longest for row in rows)
    return SamplingOptions(LengthParams(longest, first.length.min_length), first.sampling)
