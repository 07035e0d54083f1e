"""What one sender can take of a reward server: turns, bytes, connections, time.

The server is the real one; a function that counts and sleeps stands for its model.
"""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from aligner.config import RewardServerConfig
from aligner.errors import DataError, RewardServerError
from aligner.http import application, listening
from aligner.http.queue import JobQueue
from aligner.rewards.server.client import RewardClient
from aligner.rewards.server.serve import RewardService, score_until
from aligner.rewards.server.wire import WireSample

BATCH = 4
POST = b"POST /score HTTP/1.1\r\nHost: x\r\n"

pytestmark = pytest.mark.integration


@pytest.fixture
def serving():
    """``serving(seconds a batch, most that may wait)``: a server in threads of this process."""
    running = contextlib.ExitStack()

    def start(seconds=0.0, max_waiting=1000, timeout_s=30.0):
        state = SimpleNamespace(scored=0, stopping=threading.Event())

        def score(sequences):
            assert len(sequences) <= BATCH
            time.sleep(seconds)
            state.scored += len(sequences)
            return [[float(sum(ids))] for ids in sequences]

        def encode(sample):
            if sample.prompt == "bad":
                raise DataError("a bad prompt")
            if sample.prompt == "worse":
                raise TypeError("of a tokenizer")
            return [len(sample.prompt), len(sample.response)]

        queue = JobQueue(max_waiting, turn=BATCH)
        service = RewardService((), encode, queue, timeout_s, None)
        _, state.port = running.enter_context(service.serving("127.0.0.1", 0))
        state.url = f"http://127.0.0.1:{state.port}"
        state.loop = threading.Thread(
            target=score_until, args=(state.stopping, queue, score, BATCH), daemon=True
        )
        state.loop.start()
        running.callback(state.stopping.set)
        return state

    with running:
        yield start


def body_of(count):
    return json.dumps({"samples": [{"prompt": "1+1=", "response": "2"}] * count}).encode()


def post(port, body, timeout=20):
    answer = httpx.post(f"http://127.0.0.1:{port}/score", content=body, timeout=timeout)
    return answer.status_code, answer.json()


def test_more_may_not_wait_and_odd_lengths_are_answered(serving):
    state = serving(max_waiting=8)
    assert post(state.port, body_of(8))[0] == 200
    status, answer = post(state.port, body_of(9))
    assert status == 413
    assert "9 samples, at most 8" in answer["error"]
    port = serving().port
    lengths = ((b"9" * 5000, b"bad Content-Length"), (b"500", b"received 2 bytes, expected 500"))
    for length, said in lengths:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as channel:
            channel.sendall(POST + b"Content-Length: " + length + b"\r\n\r\n{}")
            channel.shutdown(socket.SHUT_WR)
            answer = channel.recv(65536) + channel.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert said in answer


def test_the_server_stops_between_two_batches(serving):
    state = serving(seconds=0.05)
    thread = threading.Thread(target=lambda: post(state.port, body_of(900), 60), daemon=True)
    thread.start()
    time.sleep(0.3)
    state.stopping.set()
    state.loop.join(2)
    assert not state.loop.is_alive()
    assert 0 < state.scored < 100


def test_an_unexpected_error_is_answered_with_json():
    service = RewardService(None, lambda sample: [1], JobQueue(10), 30.0)  # a mistake
    with service.serving("127.0.0.1", 0) as (_, port):
        answer = httpx.get(f"http://127.0.0.1:{port}/health")
    assert answer.status_code == 500
    assert answer.json() == {"error": "TypeError: 'NoneType' object is not iterable"}


def test_a_server_that_ends_answers_what_it_has_not_scored():
    service = RewardService((), lambda sample: [1], JobQueue(10), 30.0)  # and no model
    with ThreadPoolExecutor(1) as pool:
        with service.serving("127.0.0.1", 0) as (_, port):
            asked = pool.submit(post, port, body_of(1))
            time.sleep(0.5)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        status, answer = asked.result(10)
    assert (status, answer["error"]) == (503, "the server is ending, try again later")


def test_what_nobody_waits_for_is_not_scored(serving):
    state = serving(seconds=0.05, timeout_s=1.5)
    body = body_of(900)
    with socket.create_connection(("127.0.0.1", state.port)) as channel:
        channel.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.3)
    time.sleep(1.0)  # the sender has left
    left = state.scored
    time.sleep(0.5)
    assert left == state.scored < 200
    status, answer = post(state.port, body)  # a sender that waits longer than the server does
    assert status == 503
    assert "within 1.5 s" in answer["error"]
    late = state.scored
    time.sleep(0.5)
    assert state.scored - late <= BATCH


@pytest.mark.parametrize("first", [b"GET /he", POST + b"Content-Length: 5000\r\n\r\n{"])
def test_a_request_that_does_not_arrive_is_ended(serving, monkeypatch, first):
    """However busily it drips."""
    monkeypatch.setattr(listening, "ARRIVAL_S", 1.0)
    state = serving()
    with socket.create_connection(("127.0.0.1", state.port), timeout=0.2) as channel:
        started = time.monotonic()
        channel.sendall(first)
        is_open = True
        while is_open and time.monotonic() - started < 4:
            try:
                channel.sendall(b"a")
                is_open = bool(channel.recv(1))
            except TimeoutError:
                continue
            except OSError:
                is_open = False
    assert not is_open


def test_connections_are_bounded(serving, monkeypatch):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 3)
    state = serving()
    held = [socket.create_connection(("127.0.0.1", state.port)) for _ in range(3)]
    time.sleep(0.3)
    # The one that has waited longest without a request gives way, not the newest.
    assert post(state.port, body_of(1))[0] == 200
    held[0].settimeout(5)
    assert held[0].recv(100).startswith(b"HTTP/1.1 503 ")
    held[2].settimeout(0.2)
    with pytest.raises(TimeoutError):
        held[2].recv(1)
    for channel in held:
        channel.close()


def test_headers_arrive_sooner_than_a_body(serving, monkeypatch):
    monkeypatch.setattr(listening, "HEADERS_S", 0.5)
    state = serving()
    with socket.create_connection(("127.0.0.1", state.port), timeout=5) as silent:
        assert b"within 0.5 s" in silent.recv(500)
    with socket.create_connection(("127.0.0.1", state.port), timeout=1) as slow:
        slow.sendall(POST + b"Content-Length: 5000\r\n\r\n{")
        with pytest.raises(TimeoutError):
            slow.recv(1)


def test_more_connections_than_files_may_be_open(monkeypatch, caplog):
    limits = {"now": (1024, 2048)}
    monkeypatch.setattr(listening.resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(listening.resource, "setrlimit", lambda kind, pair: limits.update(now=pair))
    assert listening._within_open_files(512) == 512
    assert limits["now"] == (1024, 2048)
    assert listening._within_open_files(1000) == 1000
    assert limits["now"] == (1512, 2048)
    assert listening._within_open_files(4096) == 2048 - 512
    assert "RLIMIT_NOFILE" in caplog.text


def test_bytes_that_are_worked_on_are_bounded(serving, monkeypatch):
    monkeypatch.setattr(application, "MAX_BYTES_IN_FLIGHT", 150_000)
    state = serving()
    held = socket.create_connection(("127.0.0.1", state.port))
    held.sendall(POST + b"Content-Length: 200000\r\n\r\n" + b"[" * 140_000)
    time.sleep(0.3)
    status, answer = post(state.port, body_of(1000))
    assert status == 503
    assert "too many bytes" in answer["error"]
    held.close()
    time.sleep(0.3)
    assert post(state.port, body_of(1000))[0] == 200


def test_texts_that_cannot_be_scored_are_not_asked_again(serving):
    url = serving().url
    client = RewardClient(RewardServerConfig(url=url, timeout_s=5.0, retry_for_s=30.0))
    started = time.monotonic()
    for sample, said in (
        (("a\ud800b", "2"), "not JSON.*hex escape"),
        (("bad", ""), "a bad prompt"),
        (("worse", ""), "cannot be encoded: TypeError: of a tokenizer"),
    ):
        with pytest.raises(RewardServerError, match=rf"400 .*{said}"):
            client.score([WireSample(*sample)])
    assert time.monotonic() - started < 5
