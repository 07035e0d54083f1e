"""Rewards from a server: the client of `wire`, and the trainer's `RewardInterface` over it.

Waits are finite. What may pass (no connection, no answer in time, a server that is busy or being
restarted) is tried again, ever more slowly, for ``retry_for_s``; what will not (a token that is
refused, an answer that makes no sense) stops the run at once. Either way the message names the
server and the cause, and reaches every rank.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import torch

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.config import RewardServerConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.agreement import on_rank_zero
from aligner.errors import ConfigError, DataError, RewardServerError
from aligner.rewards.attributes import attribute_parts, check_weights, weighted
from aligner.rewards.interface import ScoredResponses, check_finite
from aligner.rewards.sequences import response_texts, scored_texts
from aligner.rewards.server.wire import (
    HEALTH,
    JSON_TYPE,
    MAX_BYTES,
    SCORE,
    WireSample,
    parse_error,
    parse_health,
    parse_rewards,
    request_body,
)

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)

# Timeouts, too many requests, and statuses of servers and proxies that restart.
_PASSING = (408, 429, 500, 502, 503, 504)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0


class _TryAgainError(Exception):
    """Failure that may pass: the request is tried again."""


class RewardClient:
    """Asks one server. Threads may share it."""

    def __init__(self, config: RewardServerConfig) -> None:
        """Read the token; nothing is sent yet."""
        self.config = config
        self._address = _address(config.url)
        self._token = read_token(config)

    def check(self) -> tuple[str, ...]:
        """Wait until the server is ready and takes the token; what it rates (see `wire`)."""
        attributes = self._ask("GET", HEALTH, b"", parse_health)
        self._ask("POST", SCORE, request_body([]), lambda body: parse_rewards(body, 0, 1))
        return attributes

    def score(self, samples: Sequence[WireSample], width: int = 1) -> list[list[float]]:
        """``width`` numbers of each sample, asked for in several requests at once.

        Raises:
            RewardServerError: the server was not to be had for ``retry_for_s``, refused, or gave
                answers that cannot be used.
        """
        size = self.config.samples_per_request
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        failed = threading.Event()  # one part did: the others need not be asked for any more

        def ask(part: Sequence[WireSample]) -> list[list[float]]:
            def parse(body: bytes) -> list[list[float]]:
                return parse_rewards(body, len(part), width)

            try:
                return self._ask("POST", SCORE, request_body(part), parse, failed)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.config.concurrent_requests) as pool:
            return [row for rows in pool.map(ask, parts) for row in rows]

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        parse: Callable[[bytes], Answer],
        given_up: threading.Event | None = None,
    ) -> Answer:
        """The parsed answer, however many tries it takes; none once ``given_up`` is set."""
        given_up = given_up or threading.Event()
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        tries = 0
        while True:
            tries += 1
            try:
                return parse(self._exchange(method, path, body))
            except DataError as error:
                raise self._error(f"{method} {path} was answered with {error}") from error
            except RewardServerError:  # an OSError too, but nothing that passes
                raise
            except (_TryAgainError, OSError, HTTPException) as error:
                cause = str(error) or type(error).__name__
                left = started + self.config.retry_for_s - time.monotonic()
                if left <= 0 or given_up.is_set():
                    raise self._error(
                        f"{cause}; gave up after {tries} tries "
                        f"(reward.server.retry_for_s={self.config.retry_for_s:g}). The run state "
                        "is as of the last save; start the server again and repeat the command"
                    ) from error
                pause = min(pause * 2, _LONGEST_PAUSE_S, max(left, 0.01))
                log.warning(
                    "reward server %s: %s; next try in %.1f s, for %.0f s at most",
                    self.config.url,
                    cause,
                    pause,
                    left,
                )
                given_up.wait(pause)

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        """One request; the body of a good answer."""
        connection = self._connection()
        try:
            headers = {"Content-Type": JSON_TYPE, "Accept": JSON_TYPE, "Connection": "close"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            with _ended_after(self.config.timeout_s, connection):
                connection.request(method, f"{self._address.path.rstrip('/')}{path}", body, headers)
                response = connection.getresponse()
                answer = self._read(response)
        except TimeoutError as error:
            raise _TryAgainError(
                f"no answer to {method} {path} within {self.config.timeout_s:g} s "
                "(reward.server.timeout_s)"
            ) from error
        finally:
            connection.close()
        if response.status == 200:
            return answer
        said = f"{response.status} {response.reason} to {method} {path}: {parse_error(answer)}"
        if response.status in _PASSING:
            raise _TryAgainError(said)
        if response.status in (401, 403):
            said += " (the token comes from reward.server.token_env or reward.server.token_file)"
        raise self._error(said)

    def _read(self, response: HTTPResponse) -> bytes:
        """The whole body; one that is cut short passes."""
        parts: list[bytes] = []
        size = 0
        while part := response.read1(2**16):
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise self._error(f"an answer of more than {MAX_BYTES} bytes")
        if response.length:  # bytes that were announced and did not come
            raise _TryAgainError(
                f"an answer cut short after {size} of {size + response.length} bytes"
            )
        return b"".join(parts)

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        assert self._address.hostname is not None
        return kind(self._address.hostname, self._address.port, timeout=self.config.timeout_s)

    def _error(self, cause: str) -> RewardServerError:
        return RewardServerError(f"reward server {self.config.url}: {cause}")


@contextlib.contextmanager
def _ended_after(seconds: float, connection: HTTPConnection) -> Iterator[None]:
    """Connect, and raise `TimeoutError` where the block takes longer than ``seconds`` in all.

    A timeout of the socket starts again with every byte, and a server may send them one by one.
    """
    deadline = time.monotonic() + seconds
    connection.connect()
    # Not connection.sock, which is gone once an answer that closes the connection has begun.
    channel = connection.sock
    expired = threading.Event()

    def end() -> None:
        expired.set()
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if expired.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError


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
        scored = ScoredResponses(
            responses, weighted(scores, self.weights), attribute_parts(scores, self.attributes)
        )
        return check_finite(scored, data["prompts"], f"the reward server {self._client.config.url}")


def read_token(config: RewardServerConfig) -> str | None:
    """The bearer token from the configured place; it is never shown anywhere."""
    if config.token_env is not None:
        token, source = os.environ.get(config.token_env), f"token_env={config.token_env}"
    elif config.token_file is not None:
        path = Path(config.token_file).expanduser()
        token, source = _content(path), f"token_file={path}"
    else:
        return None
    token = (token or "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{source} holds no token of the reward server; it must be one line of printable ASCII"
        )
    return token


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _address(url: str) -> SplitResult:
    address = urlsplit(url)
    try:
        fits = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is no number
        fits = False
    if not fits or address.username or address.query or address.fragment:
        raise ConfigError(
            f"reward.server.url={url if not address.username else '(with a password)'}: expected "
            "http://host:port or https://host:port, without user, query and fragment; the token "
            "goes into reward.server.token_env or token_file"
        )
    return address
