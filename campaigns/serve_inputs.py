"""Requests that cost a server much: other clients get an answer in seconds."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from campaigns.harness import ROOT, TINY, Campaign, served

_TOKEN = "of-the-campaign"
_QUICK_S = 5.0
_MIB = 2**20


def _chat(*messages: tuple[str, str], **more: Any) -> tuple[str, Any]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return "/v1/chat/completions", {"messages": chat, "max_tokens": 4, **more}


def _text(prompt: Any, **more: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": prompt, "max_tokens": 4, **more}


# Requests that a client sends at the same time.
_REQUESTS: dict[str, tuple[int, Callable[[], tuple[str, Any]]]] = {
    "a stop string of 1 MiB": (4, lambda: _text("1+1=", stop=["x" * _MIB])),
    "a stop string that nearly matches": (4, lambda: _text("1+1=", stop=["1" * _MIB + "x"])),
    "16 long stop strings": (
        4,
        lambda: _text("1+1=", stop=["y" * _MIB + str(n) for n in range(16)]),
    ),
    "10,000 stop strings": (4, lambda: _text("1+1=", stop=[str(n) for n in range(10_000)])),
    "1,500 roles": (45, lambda: _chat(*((f"role{n}", "x") for n in range(1500)))),
    "20,000 messages": (8, lambda: _chat(*(("user", "x") for _ in range(20_000)))),
    "a prompt of 16 MiB": (4, lambda: _text("ab " * (16 * _MIB // 3))),
    "a chat of 16 MiB": (4, lambda: _chat(("user", "ab " * (16 * _MIB // 3)))),
    "a prompt of one word": (4, lambda: _text("a" * (8 * _MIB))),
    "a prompt of blanks": (4, lambda: _text(" " * (8 * _MIB))),
    "a million tokens": (4, lambda: _text([1] * 1_000_000)),
    "10,000 prompts": (2, lambda: _text(["1+1="] * 10_000)),
    "blanks in a tool call": (4, lambda: _chat(("user", "<tool_call>" + " " * _MIB))),
    "10,000 tools": (
        4,
        lambda: _chat(
            ("user", "x"),
            tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(10_000)],
        ),
    ),
    "deep JSON": (8, lambda: _chat(("user", "x"), tools=_deep(150))),
}
_CONNECTIONS = {"silent": b"", "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"}


def run_campaign(campaign: Campaign) -> None:
    """Start one server for all cases, until a case ends it."""
    token = campaign.folder / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)
    words = [ROOT / "examples" / "serve.py", "--model", TINY, "--token-file", token]
    words += ["server.port=0", "sampling.max_length=64"]
    with served(campaign, *words, ready=r" at http://[^ :]+:(\d+)/v1") as (port, process):
        for case in campaign.while_time([*_REQUESTS, *_CONNECTIONS]):
            (_connect if case in _CONNECTIONS else _send)(campaign, case, port)
            if process.poll() is not None:
                campaign.record(case, False, f"the server ended with {process.poll()}")
                return


def _send(campaign: Campaign, case: str, port: int) -> None:
    count, make = _REQUESTS[case]
    path, body = make()
    data, responses = json.dumps(body).encode(), []
    threads = [
        threading.Thread(target=lambda: responses.append(_ask(port, path, data, 60.0)), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    _is_quick(campaign, f"{count} times {case}", port, responses)
    for thread in threads:
        thread.join(60.0)


def _connect(campaign: Campaign, case: str, port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(campaign.rng.choice((200, 520, 700))):
            with contextlib.suppress(OSError):
                channel = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                channel.sendall(_CONNECTIONS[case])
        _is_quick(campaign, f"{case} connections", port, [])


def _is_quick(campaign: Campaign, case: str, port: int, responses: list[Any]) -> None:
    """Request ``/health`` three times meanwhile, and one token at the end."""
    longest, answers = 0.0, []
    for _ in range(3):
        time.sleep(campaign.rng.uniform(0.1, 1.0))
        began = time.monotonic()
        answers.append(_ask(port, "/health", None, 30.0))
        longest = max(longest, time.monotonic() - began)
    answers.append(_ask(port, *_encoded(_text("1+1=", max_tokens=1)), 60.0))
    good = answers == [200] * 4 and longest < _QUICK_S
    note = f"/health and a token: {answers}, at most {longest:.1f} s; "
    note += f"its own: {sorted(set(responses))}"
    campaign.record(case, good, note)


def _encoded(request: tuple[str, Any]) -> tuple[str, bytes]:
    return request[0], json.dumps(request[1]).encode()


def _deep(levels: int) -> Any:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def _ask(port: int, path: str, body: bytes | None, timeout_s: float) -> int:
    """Return the status of the answer, or 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
    try:
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
