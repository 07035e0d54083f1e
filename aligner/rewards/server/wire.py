"""Protocol between client and server of a reward model: JSON over HTTP.

    GET  /health                                       200 {"status": "ok", "attributes": [...]}
    POST /score  {"samples": [{"prompt", "response"}]} 200 {"rewards": [1.5, ...]}
                                                       or  {"rewards": [[4.0, 1.2], ...]}
    anything that failed                               4xx or 5xx {"error": "why"}

``docs/reward.md`` describes the protocol. Lists are checked up to the first error, as a body may
have millions.
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
    """A prompt and its response as text, without the end-of-sequence token."""

    prompt: str
    response: str


class ScoreRequest(BaseModel):
    """Samples to score."""

    samples: Annotated[list[WireSample], FailFast()]


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Row = Annotated[
    list[_Number], FailFast(), BeforeValidator(lambda row: row if isinstance(row, list) else [row])
]


class ScoreAnswer(BaseModel):
    """Rewards: one number per sample, or one list per sample with a number per attribute."""

    rewards: Annotated[list[_Row], FailFast()]
    ids: Any = None  # sample index of each reward, by which the client checks the order


class HealthAnswer(BaseModel):
    """State of a server that is ready."""

    status: Literal["ok"]
    attributes: Annotated[list[str], FailFast()] = []


def parse_rewards(value: Any, count: int, width: int) -> list[list[float]]:
    """Return an answer's ``count`` rewards of ``width`` finite numbers, or raise `DataError`."""
    answer = validated(ScoreAnswer, value)
    rows, problem = answer.rewards, ""
    if len(rows) != count:
        problem = f"{len(rows)} rewards for {count} samples"
    elif wrong := [index for index, row in enumerate(rows) if len(row) != width]:
        problem = f"reward {wrong[0]} has {len(rows[wrong[0]])} numbers, expected {width}"
    elif answer.ids is not None and answer.ids != list(range(count)):
        problem = f"ids are not 0 to {count - 1} in order: the rewards belong to other samples"
    if problem:
        raise DataError(problem)
    return rows


def parse_error(body: bytes | bytearray) -> str:
    """Return the message of an answer ``{"error": message}``, or the start of another answer."""
    try:
        value = from_json(body)
    except ValueError:
        return body[:200].decode(errors="replace").strip()
    return str(value["error"])[:500] if isinstance(value, dict) and "error" in value else ""
