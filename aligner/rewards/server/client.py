"""Rewards from a server: the client of `wire`, and the trainer's `RewardInterface` over it.

Waits are finite. What may pass (no connection, no answer in time, a server that is busy or being
restarted) is tried again, ever more slowly, for ``retry_for_s``; what will not (a token that is
refused, an answer that makes no sense) stops the run at once. Either way the message names the
server and the cause, and reaches every rank.
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
from aligner.rewards.attributes import check_weights
from aligner.rewards.interface import ScoredResponses, rated_responses
from aligner.rewards.sequences import response_texts, scored_texts
from aligner.rewards.server.wire import (
    HEALTH,
    SCORE,
    HealthAnswer,
    WireSample,
    parse_error,
    parse_rewards,
)

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request otherwise

# Timeouts, too many requests, and statuses of servers and proxies that restart.
_PASSING = (408, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 15.0  # between two tries, of which the first is half a second


class _TryAgainError(Exception):
    """Failure that may pass: the request is tried again."""


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    body: bytes
    read: Callable[[Any], Any]  # of the JSON value; `DataError` where it is no answer

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _rating(samples: Sequence[WireSample], width: int) -> _Request:
    body = json.dumps({"samples": list(map(asdict, samples))}).encode()
    return _Request("POST", SCORE, body, lambda value: parse_rewards(value, len(samples), width))


class RewardClient:
    """Asks one server. Threads may share it."""

    def __init__(self, config: RewardServerConfig) -> None:
        """Read the token; nothing is sent yet."""
        self.config = config
        url = _checked_url(config.url)
        token = read_token(config.token_env, config.token_file, "the reward server")
        headers = {"Content-Type": JSON_TYPE, "Accept": JSON_TYPE, "Accept-Encoding": "identity"}
        headers["Connection"] = "close"
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "timeout": None,  # of httpx: begins again with every byte
            "trust_env": False,  # no proxies
            # The system's authorities, where httpx would take those of the package certifi.
            "verify": ssl.create_default_context() if url.scheme == "https" else False,
        }

    def check(self) -> tuple[str, ...]:
        """Wait until the server is ready and takes the token; what it rates (see `wire`)."""
        health = _Request("GET", HEALTH, b"", partial(validated, HealthAnswer))
        answer: HealthAnswer = self._ask_all([health, _rating([], 1)])[0]
        return tuple(answer.attributes)

    def score(self, samples: Sequence[WireSample], width: int = 1) -> list[list[float]]:
        """``width`` numbers of each sample, asked for in several requests at once.

        Raises:
            RewardServerError: the server was not to be had for ``retry_for_s``, refused, or gave
                answers that cannot be used.
        """
        size = self.config.samples_per_request
        starts = range(0, len(samples), size)
        answers = self._ask_all([_rating(samples[at : at + size], width) for at in starts])
        return [row for rows in answers for row in rows]

    def _ask_all(self, requests: Sequence[_Request]) -> list[Any]:
        """Answers to all requests as they were read, in order."""

        async def run() -> list[Any]:
            at_once = asyncio.Semaphore(self.config.concurrent_requests)

            async def ask(request: _Request) -> Any:
                async with at_once:
                    return await self._ask(session, request)

            async with httpx.AsyncClient(**self._options) as session:
                # Where one fails the loop ends, and with it the others.
                return await asyncio.gather(*map(ask, requests))

        with start_blocking_portal() as portal:  # a notebook's own loop may run in this thread
            return portal.call(run)

    async def _ask(self, session: httpx.AsyncClient, request: _Request) -> Any:
        """Answer as it was read, however many tries it takes."""
        started, pause = time.monotonic(), 0.5
        for tries in itertools.count(1):
            try:
                answer = await self._exchange(session, request)
                break
            except (_TryAgainError, httpx.TransportError) as error:
                left = self.config.retry_for_s - (time.monotonic() - started)
                if left <= 0:
                    raise self._error(
                        f"{_cause(error)}; gave up after {tries} tries "
                        f"(reward.server.retry_for_s={self.config.retry_for_s:g}). The run state "
                        "is as of the last save; start the server again and repeat the command"
                    ) from error
                wait = min(pause, max(left, 0.01))  # the last try is made as the time ends
                log.warning(
                    "reward server %s: %s; next try in %.1f s, for %.0f s at most",
                    *(self.config.url, _cause(error), wait, left),
                )
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        try:
            return request.read(answer)
        except DataError as error:
            raise self._error(f"{request} was answered with {error}") from error

    async def _exchange(self, session: httpx.AsyncClient, request: _Request) -> Any:
        """One try; the JSON value of a good answer.

        A page of a proxy, with status 200 or 404, may pass: it stands in for a server that starts.
        """
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                session.stream(request.method, request.path, content=request.body) as response,
            ):
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > MAX_BYTES:
                        raise self._error(f"an answer of more than {MAX_BYTES} bytes")
        except TimeoutError as error:
            raise _TryAgainError(
                f"no answer to {request} within {self.config.timeout_s:g} s "
                "(reward.server.timeout_s)"
            ) from error
        if response.status_code == 200:
            try:
                return parse_json(answer)
            except DataError as error:
                raise _TryAgainError(f"{request} was answered with {error}") from error
        status = f"{response.status_code} {response.reason_phrase}"
        said = f"{status} to {request}: {parse_error(answer)}"
        is_page = response.status_code == 404 and not answer.lstrip().startswith(b"{")
        if response.status_code in _PASSING or is_page:
            raise _TryAgainError(said)
        if response.status_code in (401, 403):
            said += " (the token comes from reward.server.token_env or reward.server.token_file)"
        raise self._error(said)

    def _error(self, cause: str) -> RewardServerError:
        return RewardServerError(f"reward server {self.config.url}: {cause}")


def _cause(error: BaseException) -> str:
    """The innermost cause of a failed try: httpx itself only says that no connection was made."""
    if isinstance(error, _TryAgainError):
        return str(error)
    while inner := getattr(error, "exceptions", [error.__cause__ or error.__context__])[0]:
        error = inner
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class RemoteReward:
    """Scores responses by a `RewardClient`. Only rank 0 asks; it sends the scores to the others."""

    def __init__(
        self,
        config: RewardServerConfig,
        tokenizer: Tokenizer,
        *,
        weights: Sequence[float] | None = None,
        end_strings: Sequence[str] = (),
    ) -> None:
        """Check the server's health and that ``weights`` fit what it rates.

        ``tokenizer`` is the policy's; ``end_strings`` are its stop strings, which the server is not
        shown.
        """
        self.tokenizer, self.end_strings = tokenizer, end_strings
        self._client = RewardClient(config)
        self.attributes = on_rank_zero(self._client.check)
        self.weights = check_weights(weights, self.attributes, f"the reward server {config.url}")

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row; columns as in `Reward.get_rewards`."""

        def ask() -> tuple[list[str], list[list[float]]]:
            responses = response_texts(self.tokenizer, data)
            texts = scored_texts(self.tokenizer, data, responses, self.end_strings)
            samples = list(map(WireSample, data["prompts"], texts))
            return responses, self._client.score(samples, max(1, len(self.attributes)))

        responses, rows = on_rank_zero(ask)
        scores = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)
        return rated_responses(
            responses,
            scores,
            self.attributes,
            self.weights,
            prompts=data["prompts"],
            source=f"the reward server {self._client.config.url}",
        )


def _checked_url(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
        fits = address.scheme in ("http", "https") and address.host and address.port != 0
    except httpx.InvalidURL:
        fits = False
    if not fits or address.userinfo or address.query or address.fragment:
        raise ConfigError(
            f"reward.server.url={'(with a password)' if '@' in url else url}: expected "
            "http://host:port or https://host:port, without user, query and fragment; the token "
            "goes into reward.server.token_env or token_file"
        )
    return address
