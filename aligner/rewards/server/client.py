"""Rewards from a reward server.

After a temporary failure (no connection, no answer in time, a server that is busy or restarting) a
request is repeated with growing pauses, for ``retry_for_s`` seconds. Another failure (a refused
token, an invalid answer) ends the run at once, on every rank.
"""

import asyncio
import itertools
import json
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import httpx
import torch
from anyio.from_thread import start_blocking_portal

from aligner.config import RewardServerConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, DataError, RewardServerError
from aligner.http import JSON_TYPE, MAX_BYTES
from aligner.http.messages import parse_json, validated
from aligner.http.tokens import read_token
from aligner.parallel.collectives import on_rank_zero
from aligner.rewards.function.runner import ScoredResponses
from aligner.rewards.interface import check_weights, rated_responses
from aligner.rewards.sequences import scored_texts
from aligner.rewards.server import wire

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise a line for every request

_TEMPORARY = (408, 429, 500, 502, 503, 504)  # timeouts, load, servers and proxies that restart
_MAX_PAUSE_S = 15.0  # between two tries. The first pause is half a second.


class _TryAgainError(Exception):
    """A temporary failure, after which the request is repeated."""


@dataclass(frozen=True)
class _RewardRequest:
    method: str
    path: str
    body: bytes
    parse: Callable[[Any], Any]  # returns the answer from JSON, or raises `DataError`

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _score_request(samples: Sequence[wire.WireSample], width: int) -> _RewardRequest:
    body = json.dumps({"samples": list(map(asdict, samples))}).encode()
    parse = partial(wire.parse_rewards, count=len(samples), width=width)
    return _RewardRequest("POST", wire.SCORE, body, parse)


class RewardClient:
    """Client of a reward server. Thread-safe."""

    def __init__(self, config: RewardServerConfig) -> None:
        self.config = config
        url = _checked_url(config.url)
        token = read_token(config.token_env, config.token_file, "the reward server")
        headers = {"Content-Type": JSON_TYPE, "Accept": JSON_TYPE, "Connection": "close"}
        headers["Accept-Encoding"] = "identity"
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "timeout": None,  # httpx restarts its timeouts with every byte
            "trust_env": False,  # no proxies
            # The system's certificate authorities instead of the package certifi.
            "verify": ssl.create_default_context() if url.scheme == "https" else False,
        }

    def check(self) -> tuple[str, ...]:
        """Wait until the server is ready and accepts the token. Return its reward attributes."""
        health = _RewardRequest("GET", wire.HEALTH, b"", partial(validated, wire.HealthAnswer))
        answer: wire.HealthAnswer = self._send_all([health, _score_request([], 1)])[0]
        return tuple(answer.attributes)

    def score(self, samples: Sequence[wire.WireSample], width: int = 1) -> list[list[float]]:
        """Return the server's scores: ``width`` numbers per sample, one for each attribute.

        Raises `RewardServerError` if the server was unavailable for ``retry_for_s`` seconds,
        refused a request, or sent an invalid answer.
        """
        size = self.config.samples_per_request
        starts = range(0, len(samples), size)
        requests = [_score_request(samples[start : start + size], width) for start in starts]
        return [row for rows in self._send_all(requests) for row in rows]

    def _send_all(self, requests: Sequence[_RewardRequest]) -> list[Any]:
        async def run() -> list[Any]:
            limit = asyncio.Semaphore(self.config.concurrent_requests)

            async def send(request: _RewardRequest) -> Any:
                async with limit:
                    return await self._send(session, request)

            async with httpx.AsyncClient(**self._options) as session:
                # A failure ends the loop, which cancels the other requests.
                return await asyncio.gather(*map(send, requests))

        with start_blocking_portal() as portal:  # a notebook's loop may run in this thread
            return portal.call(run)

    async def _send(self, session: httpx.AsyncClient, request: _RewardRequest) -> Any:
        started, pause = time.monotonic(), 0.5
        for tries in itertools.count(1):
            try:
                answer = await self._exchange(session, request)
                break
            except (_TryAgainError, httpx.TransportError) as error:
                remaining_s = self.config.retry_for_s - (time.monotonic() - started)
                if remaining_s <= 0:
                    raise self._error(
                        f"{_cause(error)}; gave up after {tries} tries in reward.server.retry_for_s"
                        f"={self.config.retry_for_s:g} seconds. Start the server and repeat the "
                        "command: the run continues from its last saved state"
                    ) from error
                wait = min(pause, max(remaining_s, 0.01))  # the last try is at the end of the time
                log.warning(
                    "reward server %s: %s; next try in %.1f s, for %.0f s at most",
                    *(self.config.url, _cause(error), wait, remaining_s),
                )
                await asyncio.sleep(wait)
                pause = min(2 * pause, _MAX_PAUSE_S)
        try:
            return request.parse(answer)
        except DataError as error:
            raise self._error(f"{request} was answered with {error}") from error

    async def _exchange(self, session: httpx.AsyncClient, request: _RewardRequest) -> Any:
        # Receive the answer, within the limits of time and size.
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                session.stream(request.method, request.path, content=request.body) as response,
            ):
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > MAX_BYTES:
                        raise self._error(f"{request} was answered with over {MAX_BYTES} bytes")
        except TimeoutError as error:
            raise _TryAgainError(
                f"no answer to {request} within reward.server.timeout_s="
                f"{self.config.timeout_s:g} seconds"
            ) from error
        # Text that is no JSON is a proxy's page. Its server may be starting, so try again.
        status = response.status_code
        if status == 200:
            try:
                return parse_json(answer)
            except DataError as error:
                raise _TryAgainError(f"{request} was answered with {error}") from error
        is_proxy_page = status == 404 and not answer.lstrip().startswith(b"{")
        message = f"{status} {response.reason_phrase} to {request}: {wire.parse_error(answer)}"
        if status in _TEMPORARY or is_proxy_page:
            raise _TryAgainError(message)
        if status in (401, 403):
            message += " (check reward.server.token_env or reward.server.token_file)"
        raise self._error(message)

    def _error(self, cause: str) -> RewardServerError:
        return RewardServerError(f"reward server {self.config.url}: {cause}")


def _cause(error: BaseException) -> str:
    """Return the text of the innermost exception, because httpx's own text omits the cause."""
    if isinstance(error, _TryAgainError):
        return str(error)
    while inner := getattr(error, "exceptions", [error.__cause__ or error.__context__])[0]:
        error = inner
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class RemoteReward:
    """Scores the responses of a rollout by a reward server, which only rank 0 calls."""

    def __init__(
        self,
        config: RewardServerConfig,
        tokenizer: Tokenizer,
        *,
        weights: Sequence[float] | None = None,
        end_strings: Sequence[str] = (),
    ) -> None:
        """Wait until the server at ``config.url`` answers, and check ``weights``.

        ``tokenizer``: the policy's tokenizer. ``weights``: see `check_weights`. ``end_strings``:
        stop strings, removed from the end of responses before scoring.
        """
        self.tokenizer, self.end_strings = tokenizer, end_strings
        self._client = RewardClient(config)
        self.attributes = on_rank_zero(self._client.check)
        self.weights = check_weights(weights, self.attributes, f"the reward server {config.url}")

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every response of a rollout batch, with the columns of `Reward.get_rewards`."""

        def score() -> tuple[list[str], list[list[float]]]:
            responses, texts = scored_texts(self.tokenizer, data, self.end_strings)
            samples = list(map(wire.WireSample, data["prompts"], texts))
            return responses, self._client.score(samples, max(1, len(self.attributes)))

        responses, rows = on_rank_zero(score)
        # Every rank builds the same tensors.
        scores = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)
        attributes, source = self.attributes, f"the reward server {self._client.config.url}"
        return rated_responses(
            responses, scores, attributes, self.weights, prompts=data["prompts"], source=source
        )


def _checked_url(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
        fits = address.scheme in ("http", "https") and address.host and address.port != 0
    except httpx.InvalidURL:
        fits = False
    if not fits or address.userinfo or address.query or address.fragment:
        raise ConfigError(
            f"reward.server.url={'(with a password)' if '@' in url else url} must have the form "
            "http://host:port or https://host:port, without user, query and fragment. Set the "
            "token in reward.server.token_env or reward.server.token_file"
        )
    return address
