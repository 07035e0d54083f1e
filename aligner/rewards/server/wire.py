"""Protocol between client and server of a reward model: JSON over HTTP.

    GET  /health                                       200 {"status": "ok", "attributes": [...]}
    POST /score  {"samples": [{"prompt", "response"}]} 200 {"rewards": [1.5, ...]}
                                                       or  {"rewards": [[4.0, 1.2], ...]}
    anything that failed                               4xx or 5xx {"error": "why"}

``attributes`` names what the model rates, in the order of the numbers of a reward; empty where it
gives one number for comparisons. ``docs/reward.md`` describes it in full.

Lists fail fast: a body may hold millions of mistakes.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import from_json

from aligner.errors import DataError
from aligner.http.messages import validated

HEALTH, SCORE = "/health", "/score"


@dataclass(frozen=True, slots=True)
class WireSample:
    """One prompt and the response to it, as text; the end-of-sequence token is no part of it."""

    prompt: str
    response: str


class ScoreRequest(BaseModel):
    """Samples to score."""

    samples: Annotated[list[WireSample], FailFast()]


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Row = Annotated[
    list[_Number],
    FailFast(),
    BeforeValidator(lambda row: row if isinstance(row, list) else [row]),
]


class ScoreAnswer(BaseModel):
    """Rewards: of each sample one number, or a list of one for each attribute.

    ``ids``: position in the request of the sample that each reward is of; None: they are in order.
    """

    rewards: Annotated[list[_Row], FailFast()]
    ids: Any = None  # compared with what is expected, so of any type


class HealthAnswer(BaseModel):
    """State of a server that is ready."""

    status: Literal["ok"]
    attributes: Annotated[list[str], FailFast()] = []


def parse_rewards(value: Any, count: int, width: int) -> list[list[float]]:
    """``count`` rows of ``width`` finite numbers; `DataError` where an answer is anything else."""
    answer = validated(ScoreAnswer, value)
    rows = answer.rewards
    if len(rows) != count:
        raise DataError(f"{len(rows)} rewards for {count} samples")
    for number, row in enumerate(rows):
        if len(row) != width:
            raise DataError(f"reward {number} has {len(row)} numbers, expected {width}")
    if answer.ids is not None and answer.ids != list(range(count)):
        raise DataError(f"ids are not 0 to {count - 1} in order: the rewards are of other samples")
    return rows


def parse_error(body: bytes | bytearray) -> str:
    """The message of an answer ``{"error": message}``, or the beginning of whatever it is."""
    try:
        value = from_json(body)
    except ValueError:
        return body[:200].decode(errors="replace").strip()
    return str(value["error"])[:500] if isinstance(value, dict) and "error" in value else ""
