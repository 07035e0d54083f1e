"""Listening of the library's servers: uvicorn, within limits that one sender cannot pass.

Bounded are the connections, and the time until a request has arrived and until its answer is taken.
`aligner.http.application` bounds the bytes of requests.
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

from aligner.http import JSON_TYPE

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
HEADERS_S = 10.0  # of a request's headers, from the moment it is connected
ARRIVAL_S = 60.0  # of a whole request, headers and body, from the moment it is connected
_PIECE = 2**12  # of what came, for h11

_OTHER_FILES = 512  # that a process has open beside its connections

# Body of a refusal: from its status and its cause.
Refusal = Callable[[int, str], Any]


class _Connection(H11Protocol):
    """One request and its answer in bounded time; uvicorn by itself waits for a request forever."""

    most: int  # connections
    refusal: Refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; where there are too many the oldest without one gives way."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(min(HEADERS_S, ARRIVAL_S), self._expire)
        known = (one for one in self.connections if isinstance(one, _Connection))
        open_ones = [one for one in known if not one.transport.is_closing()]
        if len(open_ones) > self.most:
            arriving = [one for one in open_ones if one is not self and one.is_arriving]
            oldest = min(arriving, key=lambda one: one._since, default=self)
            oldest._refuse(503, "too many connections; try again later")

    @property
    def is_arriving(self) -> bool:
        """True as long as no whole request is there."""
        return self.cycle is None or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait until the answer is taken."""
        self._deadline.cancel()
        self._deadline = self.loop.call_later(ARRIVAL_S, self.transport.abort)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse in pieces: headers of any size would pass h11's limit if they came at once."""
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE])

    def eof_received(self) -> None:
        """Refuse a body that ends early; asyncio closes the connection."""
        if self.cycle is not None and self.cycle.more_body:
            self.conn.receive_data(b"")
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 has raised an error for."""
        error = sys.exception()
        self._refuse(getattr(error, "error_status_hint", 400), f"{msg} {error}")

    def _expire(self) -> None:
        left = self._since + ARRIVAL_S - self.loop.time()
        if self.cycle is not None and self.cycle.more_body and left > 0:
            self._deadline = self.loop.call_later(left, self._expire)
        elif self.is_arriving:
            most = ARRIVAL_S if self.cycle else min(HEADERS_S, ARRIVAL_S)
            self._refuse(408, f"the request did not arrive within {most:g} s")

    def _refuse(self, status: int, cause: str) -> None:
        """Answer in place of the application."""
        body = json.dumps(self.refusal(status, cause)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


@contextlib.contextmanager
def listening(
    app: FastAPI,
    address: tuple[str, int],
    refusal: Refusal,
    connections: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Answer requests with ``app``; see `aligner.http.application.http_server`."""
    most = _within_open_files(connections or MOST_CONNECTIONS)
    config = uvicorn.Config(
        app,
        http=type("Connection", (_Connection,), {"refusal": staticmethod(refusal), "most": most}),
        ws="none",
        loop="asyncio",
        lifespan="off",
        # Requests are not logged: headers hold the token, bodies are people's texts.
        log_config=None,
        log_level="critical",
        access_log=False,
        headers=[("Connection", "close")],
        timeout_graceful_shutdown=1,
    )
    with socket.create_server(address) as listener:
        server = uvicorn.Server(config)
        # A daemon, and so are the threads that it starts: none of them outlives the process.
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join(10)


def _within_open_files(connections: int) -> int:
    """At most so many connections, for which the process's limit of open files is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        connections = max(1, soft - _OTHER_FILES)
        log.warning("RLIMIT_NOFILE=%d: at most %d connections are taken", soft, connections)
    return connections
