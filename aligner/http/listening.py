"""Connections of HTTP servers: uvicorn, with a limit on their number and with time limits.

client ── bytes ──► _Connection ── request ──► application (uvicorn's event loop, a thread)
   ▲                     │                          │
   └── refusal (late) ◄──┘ ◄──────── answer ────────┘
"""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from aligner.errors import ConfigError, raised_as
from aligner.http import JSON_TYPE

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
HEADERS_S = 10.0  # time limit of a request's headers, from the connection on
ARRIVAL_S = 60.0  # time limit of a request, headers and body, from the connection on
_CHUNK_BYTES = 2**12  # passed to h11 at once
_OTHER_FILES = 512  # open files of a process other than its connections

Refusal = Callable[[int, str], Any]  # returns an error response's body from status and cause


class _Connection(H11Protocol):
    """A connection for one request, with time limits for its arrival, which uvicorn lacks."""

    max_connections: int
    refusal: Refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(min(HEADERS_S, ARRIVAL_S), self._expire)
        peers = [
            peer
            for peer in self.connections
            if isinstance(peer, _Connection) and not peer.transport.is_closing()
        ]
        if len(peers) > self.max_connections:  # refuse the connection that waits the longest
            idle = [peer for peer in peers if peer is not self and peer.is_arriving]
            oldest = min(idle, key=lambda peer: peer._since, default=self)
            oldest._refuse(503, "too many connections, try again later")

    @property
    def is_arriving(self) -> bool:
        return self.cycle is None or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._deadline.cancel()  # now the client must receive the answer
        self._deadline = self.loop.call_later(ARRIVAL_S, self.transport.abort)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        # In chunks, as h11 does not limit headers that arrive at once.
        for start in range(0, len(data), _CHUNK_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _CHUNK_BYTES])

    def eof_received(self) -> None:
        """Refuse a request whose body is incomplete, when the client closes its end."""
        if self.cycle is not None and self.cycle.more_body:
            self.conn.receive_data(b"")
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        self._refuse(getattr(error, "error_status_hint", 400), f"{msg} {error}")

    def _expire(self) -> None:
        remaining_s = self._since + ARRIVAL_S - self.loop.time()
        if self.cycle is not None and self.cycle.more_body and remaining_s > 0:
            self._deadline = self.loop.call_later(remaining_s, self._expire)
        elif self.is_arriving:
            limit_s = ARRIVAL_S if self.cycle else min(HEADERS_S, ARRIVAL_S)
            self._refuse(408, f"the request did not arrive within {limit_s:g} s")

    def _refuse(self, status: int, cause: str) -> None:
        """Send an error response without calling the application. Close the connection."""
        body = json.dumps(self.refusal(status, cause)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


@contextlib.contextmanager
def listening(
    app: FastAPI, address: tuple[str, int], refusal: Refusal, setting: str, connections: int | None
) -> Iterator[tuple[str, int]]:
    """Context manager: serve ``app`` in a thread, and yield (host, port). See `http_server`."""
    max_connections = _within_open_files(connections or MAX_CONNECTIONS)
    # uvicorn constructs the connections, so the settings are attributes of a subclass.
    settings = {"refusal": staticmethod(refusal), "max_connections": max_connections}
    config = uvicorn.Config(
        app,
        http=type("Connection", (_Connection,), settings),
        ws="none",
        loop="asyncio",
        lifespan="off",
        # No logs of requests: headers contain the token, and bodies are private.
        log_config=None,
        log_level="critical",
        access_log=False,
        headers=[("Connection", "close")],
        timeout_graceful_shutdown=1,
    )
    remedy = "set another port, or 0 for any free port"
    with raised_as(ConfigError, f"{setting}: cannot listen", OSError, remedy=remedy):
        listener = socket.create_server(address)
    with listener:
        server = uvicorn.Server(config)
        # A daemon thread does not keep the process alive.
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join(10)


def _within_open_files(connections: int) -> int:
    """Raise the limit of open files, and return how many of ``connections`` it then allows."""
    # The soft limit can be raised up to the hard limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return connections
    soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < files:
        connections = max(1, soft - _OTHER_FILES)
        log.warning("RLIMIT_NOFILE=%d: at most %d connections are accepted", soft, connections)
    return connections
