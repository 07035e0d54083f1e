"""The reward server under abuse, and its client before servers that lie."""

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

from campaigns.harness import PPO, ROOT, TINY, Campaign, run, served

_HOST = b"Host: x\r\n"
_POST = b"POST /score HTTP/1.1\r\n" + _HOST
# Bodies, and the status that answers them.
_BODIES: dict[str, tuple[bytes, int]] = {
    "no samples": (b'{"samples": []}', 200),
    "broken": (b"{", 400),
    "no object": (b"[]", 400),
    "no response": (b'{"samples": [{"prompt": "x"}]}', 400),
    "number": (b'{"samples": [{"prompt": 1, "response": 2}]}', 400),
    "latin-1": ('{"samples": [{"prompt": "é", "response": "x"}]}'.encode("latin-1"), 400),
    "nul": (b"\0" * 100, 400),
    "deep": (b"[" * 200_000, 400),
    "surrogate": (b'{"samples": [{"prompt": "a\\ud800", "response": "x"}]}', 400),
    "huge integer": (b'{"samples": [1' + b"0" * 5000 + b"]}", 400),
    "too long": (b'{"samples": [{"prompt": "' + b"x" * 5000 + b'", "response": "x"}]}', 400),
}
_RAW: dict[str, tuple[bytes, bytes]] = {
    "no length": (_POST + b"\r\n{}", b" 411 "),
    "negative length": (_POST + b"Content-Length: -5\r\n\r\n", b" 400 "),
    "65 MiB": (_POST + b"Content-Length: 68157441\r\n\r\n", b" 413 "),
    "5000 digits": (_POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b" 400 "),
    "PUT": (b"PUT /score HTTP/1.1\r\n" + _HOST + b"\r\n", b" 405 "),
    "path": (b"POST /../../etc/passwd HTTP/1.1\r\n" + _HOST + b"\r\n", b" 404 "),
    "long line": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 431 "),
    "long header": (b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", b" 431 "),
}
# What a lying server does, and whether the client is to get through in the end.
_LIES = {
    **dict.fromkeys(("ok", "flaky", "short"), True),
    **dict.fromkeys(("500", "404", "302", "close", "hang", "drip body", "drip headers"), False),
    **dict.fromkeys(("garbage", "empty", "wrong count", "nan", "huge", "nested", "deep"), False),
}


def run_campaign(campaign: Campaign) -> None:
    """Test the server first, then the client."""
    model = campaign.fresh("model")
    run_result = run(
        campaign,
        "train_gpt_reward",
        [
            *("--config-name", "recipes/reward_tiny_cpu", f"model.restore_from_path={TINY}"),
            *("trainer.reward_model.max_steps=1", "exp_manager.create_tensorboard_logger=false"),
            f"exp_manager.explicit_log_dir={model}",
        ],
    )
    campaign.record("a reward model", run_result.status == 0, run_result.last)
    if run_result.status == 0:
        script = ROOT / "examples" / "serve_reward_model.py"
        words = [script, "--model", model / "reward_model.nemo", "--port", 0]
        with served(campaign, *words, ready=r"ready at http://[^ :]+:(\d+)") as (port, process):
            _abuse(campaign, port, process)
    for lie in campaign.while_time(sorted(_LIES)):
        _before_a_liar(campaign, lie)


def _abuse(campaign: Campaign, port: int, process: Any) -> None:
    for name, (body, status) in _BODIES.items():
        reply = _ask(port, body)
        campaign.record(f"body: {name}", reply[0] == status, str(reply))
    for name, (data, word) in _RAW.items():
        answer = _raw(port, data)
        campaign.record(f"raw: {name}", word in answer[:20], repr(answer[:60]))
    too_many = _ask(port, _samples(5000))
    campaign.record("5000 samples", too_many[0] == 413, str(too_many))
    threads = [threading.Thread(target=_ask, args=(port, _samples(4000), 120)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    _quick(campaign, "beside a large request", port)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for channel in slow:
        channel.sendall(_POST + b"Content-Length: 60000000\r\n\r\n{")
    _quick(campaign, "beside 200 slow clients", port)
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda count: _ask(port, _samples(count % 5 + 1), 60), range(90)))
    right = [
        status == 200 and len(json.loads(text)["rewards"]) == count % 5 + 1
        for count, (status, text) in enumerate(answers)
    ]
    campaign.record("90 requests at once", all(right), f"{sum(right)} right")
    big = b'{"samples": [' + b'{"prompt": "1", "response": "2"},' * 1_500_000 + b"1]}"
    with ThreadPoolExecutor(4) as pool:
        statuses = [status for status, _ in pool.map(lambda _: _ask(port, big, 120), range(4))]
    memory = psutil.Process(process.pid).memory_info().rss / 2**30
    note = f"{statuses}, {memory:.1f} GiB afterwards"
    campaign.record("four large bodies", set(map(str, statuses)) <= {"400", "413", "503"}, note)
    late = threading.Thread(target=_ask, args=(port, _samples(4000), 30), daemon=True)
    late.start()
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(Exception):
        process.wait(30)
    seconds = time.monotonic() - started
    good = process.returncode == 0 and seconds < 20
    campaign.record(
        "SIGTERM under load", good, f"status {process.returncode} after {seconds:.1f} s"
    )
    for channel in slow:
        channel.close()


def _quick(campaign: Campaign, name: str, port: int) -> None:
    started = time.monotonic()
    status, text = _ask(port, _samples(1), 60)
    seconds = time.monotonic() - started
    campaign.record(
        name, status == 200 and seconds < 20, f"{status} after {seconds:.1f} s; {text[:60]}"
    )


def _samples(count: int) -> bytes:
    sample = {"prompt": "1+1=", "response": "2"}
    return json.dumps({"samples": [sample] * count}).encode()


def _ask(port: int, body: bytes, timeout_s: float = 20) -> tuple[int | str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__, str(error)
    finally:
        connection.close()


def _raw(port: int, data: bytes) -> bytes:
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=10) as channel,
    ):
        channel.sendall(data)
        while piece := channel.recv(65536):
            answer += piece
    return answer


# The client ----------------------------------------------------------------------------------


class _Liar(ThreadingHTTPServer):
    daemon_threads = True
    lie, asked = "ok", 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that give up, which this campaign causes."""


class _Answers(BaseHTTPRequestHandler):
    server: _Liar
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer a health check."""
        self._send(b'{"status": "ok", "attributes": []}')

    def do_POST(self) -> None:
        """Answer with a lie, unless the request has no sample."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        count = len(json.loads(body)["samples"])
        good = json.dumps({"rewards": [0.5] * count}).encode()
        if not count:
            self._send(good)
            return
        self.server.asked += 1
        lies = self._lies(count, good)
        lies.get(self.server.lie, lambda: self._send(good))()

    def _lies(self, count: int, good: bytes) -> dict[str, Callable[[], None]]:
        first = self.server.asked == 1

        def rewards(values: list[Any]) -> Callable[[], None]:
            return lambda: self._send(json.dumps({"rewards": values}).encode())

        return {
            "flaky": lambda: self._send(good, 500 if first else 200),
            "short": lambda: self._send(good[:-3] if first else good, length=len(good)),
            "500": lambda: self._send(b'{"error": "x"}', 500),
            "404": lambda: self._send(b'{"error": "x"}', 404),
            "302": lambda: self._send(b"", 302),
            "close": self.connection.close,
            "hang": lambda: time.sleep(60),
            "drip body": lambda: self._drip(
                b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b" "
            ),
            "drip headers": lambda: self._drip(b"HTTP/1.1 200 OK\r\n", b"x"),
            "garbage": lambda: self._send(os.urandom(300)),
            "empty": lambda: self._send(b""),
            "wrong count": rewards([0.5] * (count + 1)),
            "nan": rewards([float("nan")] * count),
            "huge": rewards([1e300] * count),
            "nested": rewards([[0.5, 0.5]] * count),
            "deep": lambda: self._send(b"[" * 100_000),
        }

    def _send(self, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, begin: bytes, drop: bytes) -> None:
        self.wfile.write(begin)
        for _ in range(200):
            self.wfile.write(drop)
            self.wfile.flush()
            time.sleep(0.3)


def _before_a_liar(campaign: Campaign, lie: str) -> None:
    liar = _Liar(("127.0.0.1", 0), _Answers)
    liar.lie = lie
    threading.Thread(target=liar.serve_forever, daemon=True).start()
    folder = campaign.fresh(f"before_{lie}")
    arguments = [
        *(*PPO, "reward=server", f"reward.server.url=http://127.0.0.1:{liar.server_address[1]}"),
        *("reward.server.timeout_s=1.5", "reward.server.retry_for_s=4"),
        f"exp_manager.explicit_log_dir={folder}",
    ]
    try:
        outcome = run(campaign, "train_gpt_ppo", arguments, timeout_s=60)
    finally:
        liar.shutdown()
        liar.server_close()
    expected = "ok" if _LIES[lie] else "refused"
    note = f"{outcome.verdict} after {outcome.seconds:.1f} s: {outcome.last}"
    campaign.record(f"a server that lies: {lie}", outcome.verdict == expected, note)
