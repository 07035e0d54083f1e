"""Protocol between client and server of a reward model: JSON over HTTP.

    GET  /health                                       200 {"status": "ok", "attributes": [...]}
    POST /score  {"samples": [{"prompt", "response"}]} 200 {"rewards": [1.5, ...]}
                                                       or  {"rewards": [[4.0, 1.2], ...]}
    anything that failed                               4xx or 5xx {"error": "why"}

``attributes`` names what the model rates, in the order of the numbers of a reward; empty where it
gives one number for comparisons. ``docs/reward.md`` describes it in full.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from aligner.errors import DataError
from aligner.rewards.protocol import shown

HEALTH, SCORE = "/health", "/score"
JSON_TYPE = "application/json"
MAX_BYTES = 64 * 2**20  # of a request, and of an answer


class WireSample(NamedTuple):
    """One prompt and the response to it, as text; the end-of-sequence token is no part of it."""

    prompt: str
    response: str


def request_body(samples: Sequence[WireSample]) -> bytes:
    """The body of a request to score ``samples``."""
    return json.dumps({"samples": [sample._asdict() for sample in samples]}).encode()


def parse_request(body: bytes) -> list[WireSample]:
    """Inverse of `request_body`; `DataError` where it is not one."""
    value = _parse(body)
    rows = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise DataError('the body must be {"samples": [{"prompt": text, "response": text}, ...]}')
    return [_sample(row, number) for number, row in enumerate(rows)]


def rewards_body(rewards: Sequence[Sequence[float]]) -> bytes:
    """The answer: of each sample one number, or one of each attribute."""
    plain = [row[0] if len(row) == 1 else list(row) for row in rewards]
    return json.dumps({"rewards": plain}).encode()


def parse_rewards(body: bytes, count: int, width: int) -> list[list[float]]:
    """``count`` rows of ``width`` finite numbers; `DataError` where an answer is anything else."""
    value = _parse(body)
    rows = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise DataError(f'the answer has no list "rewards": {shown(value)}')
    if len(rows) != count:
        raise DataError(f"{len(rows)} rewards for {count} samples")
    return [_row(row, number, width) for number, row in enumerate(rows)]


def health_body(attributes: Sequence[str]) -> bytes:
    """The answer of a server that is ready."""
    return json.dumps({"status": "ok", "attributes": list(attributes)}).encode()


def parse_health(body: bytes) -> tuple[str, ...]:
    """The attributes of a server that is ready; `DataError` where it is not."""
    value = _parse(body)
    if not isinstance(value, dict) or value.get("status") != "ok":
        raise DataError(f'/health does not say "status": "ok" but {shown(value)}')
    names = value.get("attributes", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f'"attributes" of /health must be a list of names, it is {shown(names)}')
    return tuple(names)


def error_body(message: str) -> bytes:
    """Body that accompanies a status other than 200."""
    return json.dumps({"error": message}).encode()


def parse_error(body: bytes) -> str:
    """The message of an `error_body`, or the beginning of whatever it is."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace").strip()
    return str(value["error"])[:500] if isinstance(value, dict) and "error" in value else ""


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {body[:80]!r} ({error})") from error


def _sample(row: Any, number: int) -> WireSample:
    texts: list[Any] = [None]
    if isinstance(row, dict):
        texts = [row.get(name) for name in WireSample._fields]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f'samples[{number}] must be {{"prompt": text, "response": text}}')
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"samples[{number}] holds half a surrogate pair: {error}") from error
    return WireSample(*texts)


def _row(row: Any, number: int, width: int) -> list[float]:
    numbers = row if isinstance(row, list) else [row]
    if len(numbers) != width:
        raise DataError(f"reward {number} has {len(numbers)} numbers, expected {width}")
    for value in numbers:
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise DataError(f"reward {number} is {shown(row)}, expected finite numbers")
    return [float(value) for value in numbers]


def _finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond any float
        return False
