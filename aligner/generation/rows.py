"""Rows of requests to a policy, and the progress of their answers.

A request becomes rows, one for each answer. Rows that are sampled alike are generated together,
whatever requests they are of.
"""

import hashlib
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
    """Next tokens of a row, with one log-prob each. ``end``: None: more will come.

    ``kept``: int32 [n, K], ids that the sampler kept for each token, where they are recorded.
    """

    row: int
    ids: list[int]
    logprobs: list[float]
    end: EndKind | None = None
    kept: Tensor | None = None


@dataclass
class Row:
    """One answer that is asked for, by a session as its number ``request``.

    ``sample_id``: of which the engine makes random numbers. ``options``: None: the engine's own.
    """

    prompt: list[int]
    sample_id: int
    options: SamplingOptions | None
    request: int | None = None

    @property
    def longest(self) -> int:
        """Most new tokens."""
        return sys.maxsize if self.options is None else self.options.length.max_length


@dataclass
class RowJob(Job[Row]):
    """The rows of one request. ``failure``: of the engine, in place of an answer."""

    failure: Failure | None = None

    @property
    def is_open(self) -> bool:
        """True as long as somebody waits for the engine."""
        return not self.is_abandoned and self.failure is None and self.ended < len(self.items)


def fit_together(rows: Sequence[Row], positions: int) -> bool:
    """Return whether the rows, of which all but the last do, can be one batch.

    The longest prompt and the longest answer together fit into ``positions``, those of the model.
    """
    first, last = rows[0].options, rows[-1].options
    if first is None or last is None:
        return first is last
    if (last.sampling, last.length.min_length) != (first.sampling, first.length.min_length):
        return False
    return max(len(row.prompt) for row in rows) + max(row.longest for row in rows) <= positions


def batch_options(rows: Sequence[Row]) -> SamplingOptions | None:
    """Sampling of a batch: that of its rows, with the length of the longest; None: the engine's."""
    first = rows[0].options if rows else None
    if first is None:
        return None
    longest = max(row.longest for row in rows)
    return SamplingOptions(LengthParams(longest, first.length.min_length), first.sampling)


def sample_id(*parts: object) -> int:
    """Sample id, 0 <= id < 2**63, of nothing but ``parts``, which are written as text."""
    text = " ".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
