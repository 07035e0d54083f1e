"""Batches, tools and ends of a policy's server, for an engine whose answers are written down.

The HTTP side is the real one.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import pytest
import torch
from chat_families import FAMILIES
from torch.nn.utils.rnn import pad_sequence

from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import NonFiniteError, WorkerDiedError
from aligner.generation.batching import ServingEngine
from aligner.http.queue import JobQueue
from aligner.serving.app import Service, policy_server
from aligner.serving.served import Served

pytestmark = pytest.mark.integration  # each test starts a server
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculator", "description": "Compute.", "parameters": PARAMETERS}
CALCULATOR = {"type": "function", "function": FUNCTION}
QUESTION = {"role": "user", "content": "2*21?"}


class Scripted:
    """Says ``reply(prompt)``, a token a step, and ends."""

    def __init__(self, tokenizer, reply, seconds=0.0):
        self.tokenizer, self.reply, self.seconds = tokenizer, reply, seconds
        self.batches, self.abandoned, self.began = [], 0, threading.Event()

    def generate(self, data, greedy=False, *, seed=None, sampling_options=None, listener=None):
        rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        prompts = [ids[:length] for ids, length in rows]
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        self.batches.append((texts, sampling_options))
        self.began.set()
        most = sampling_options.length.max_length
        answers = [self.tokenizer.encode(self.reply(text)) for text in texts]
        ends = [len(ids) < most for ids in answers]
        answers = [[*ids, self.tokenizer.eos_id][:most] for ids in answers]
        for step in range(max(map(len, answers))):
            time.sleep(self.seconds)
            for row, ids in enumerate(answers):
                if listener is not None and step < len(ids):
                    try:
                        listener(row, ids[step], -0.5)
                    except Exception:
                        self.abandoned += 1
                        raise
        pairs = list(zip(prompts, answers, strict=True))
        rows = [torch.tensor(prompt + answer) for prompt, answer in pairs]
        logprobs = [torch.tensor([0.0] * len(p) + [-0.5] * len(a)) for p, a in pairs]
        return BatchedDataDict(
            {
                "output_ids": pad_sequence(rows, batch_first=True),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
                "logprobs": pad_sequence(logprobs, batch_first=True),
                "is_end": torch.tensor(ends),
            }
        )


@contextmanager
def serving(reply, *, seconds=0.0, tokenizer=None, listens=True, most=64, timeout_s=20.0):
    tokenizer = tokenizer or byte_level_tokenizer()
    script = Scripted(tokenizer, reply, seconds)
    waiting, stopping = JobQueue(most), threading.Event()
    defaults = SamplingOptions(LengthParams(max_length=100), SamplingParams())
    served = Served("model", tokenizer, 2000, tokenizer.vocab_size, defaults)
    ends = frozenset(tokenizer.end_ids)
    rest = (8, 2000, tokenizer.pad_id, ends, 1, listens)
    engine = ServingEngine(script, waiting, *rest, has_peers=False)
    errors = []

    def run():
        try:
            engine.serve(stopping.is_set)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with ExitStack() as closing:
        address = ("127.0.0.1", 0)
        service = Service(served, waiting, timeout_s, "key")
        host, port = closing.enter_context(policy_server(address, service, "server"))
        url = f"http://{host}:{port}"
        key = {"Authorization": "Bearer key"}
        client = closing.enter_context(httpx.Client(base_url=url, headers=key, timeout=20))
        thread.start()
        closing.callback(thread.join, 10)
        closing.callback(stopping.set)
        yield SimpleNamespace(
            script=script, client=client, stopping=stopping, thread=thread, errors=errors
        )


def texts(answer):
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("listens", [True, False])
def test_what_waits_at_the_same_time_is_one_batch(listens):
    def ask(body):
        return server.client.post(TEXT, json=body)

    slow = serving(lambda text: text[::-1], seconds=0.03, listens=listens)
    with slow as server, ThreadPoolExecutor(12) as pool:
        first = pool.submit(ask, {"prompt": "first" * 6})
        assert server.script.began.wait(5)
        alike = [pool.submit(ask, {"prompt": f"ab{n}", "max_tokens": 2 + n}) for n in range(5)]
        others = [pool.submit(ask, {"prompt": "cd", "temperature": t}) for t in (0, 0.5)]
        assert texts(first.result()) == ["tsrif" * 6]
        # Each has its own length, though they were generated together.
        assert [texts(one.result()) for one in alike] == [["0b"], ["1ba"]] + [
            [f"{n}ba"] for n in (2, 3, 4)
        ]
        reasons = [one.result().json()["choices"][0]["finish_reason"] for one in alike]
        assert reasons == ["length", "length", "stop", "stop", "stop"]
        assert [texts(one.result()) for one in others] == [["dc"]] * 2
        sizes = [len(prompts) for prompts, _ in server.script.batches]
        assert sorted(sizes) == [1, 1, 1, 5]
        options = {len(prompts): options for prompts, options in server.script.batches}
        assert options[5].length.max_length == 6


def test_a_request_of_many_answers_takes_turns():
    with serving(lambda text: "x", seconds=0.05) as server, ThreadPoolExecutor(2) as pool:
        many = pool.submit(server.client.post, TEXT, json={"prompt": "many", "n": 40})
        assert server.script.began.wait(5)
        assert texts(server.client.post(TEXT, json={"prompt": "one"})) == ["x"]
        before = len(server.script.batches)
        assert texts(many.result()) == ["x"] * 40
    assert before <= 3
    assert all(len(prompts) <= 8 for prompts, _ in server.script.batches)


@pytest.mark.parametrize("listens", [True, False])
def test_stop_strings_are_held_back_until_they_are_sure(listens):
    with serving(lambda text: "one EN two END three", listens=listens) as server:
        asked = {"prompt": "x", "stop": ["###", "END"], "stream": True}
        with server.client.stream("POST", TEXT, json=asked) as answer:
            lines = [
                json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")
            ]
    parts = [piece["choices"][0]["text"] for piece in lines]
    assert "".join(parts) == "one EN two "
    assert len(parts) == (10 if listens else 2)  # "EN " in one piece; the end in one of its own
    assert lines[-1]["choices"][0]["finish_reason"] == "stop"


ARGUMENTS = {"expression": "2*21"}
IN_JSON = json.dumps(ARGUMENTS)
CALLED = json.dumps({"name": "calculator", "arguments": ARGUMENTS})
# What a model of each family says to call the calculator, and the text before the call.
REPLIES = {
    "plain": (f"Let me see.\ncall calculator {IN_JSON}", "Let me see."),
    "qwen": (f"Let me see.\n<tool_call>\n{CALLED}\n</tool_call>", "Let me see."),
    "llama3": (json.dumps({"name": "calculator", "parameters": ARGUMENTS}), ""),
    "mistral": (f"[TOOL_CALLS] [{CALLED}]", ""),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", REPLIES)
def test_tools_are_shown_and_calls_are_read(family, stream):
    tokenizer = FAMILIES[family].make() if family != "plain" else byte_level_tokenizer()
    reply, before = REPLIES[family]

    def answer(text):
        return "42" if "42" in text else reply

    with serving(answer, tokenizer=tokenizer) as server:
        asked = {"messages": [QUESTION], "tools": [CALCULATOR]}
        message, reason = chat(server, stream, **asked)
        assert reason == "tool_calls"
        assert (message["content"] or "") == before
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "calculator"
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        call.pop("index", None)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        said = {"role": "assistant", "refusal": None, "annotations": [], **message}
        asked["messages"] = [QUESTION, said, result]
        assert chat(server, stream, **asked) == ({"role": "assistant", "content": "42"}, "stop")
        (first,), _ = server.script.batches[0]
        (second,), _ = server.script.batches[1]
        assert chat(server, stream, messages=[QUESTION])[0]["content"] == reply  # no tools: text
    if family == "plain":
        assert 'call calculator {"expression": "<string>"}: Compute.' in first
        assert f"call calculator {IN_JSON}" in second
        assert "result of calculator: 42" in second
    assert "calculator" in first
    assert second.count("2*21?") == 1


def chat(server, stream, **asked):
    """The message of an answer, and why it ended."""
    asked["stream"] = stream
    if not stream:
        (choice,) = server.client.post(CHAT, json=asked).json()["choices"]
        choice["message"].pop("refusal")
        return choice["message"], choice["finish_reason"]
    message, reason = {}, None
    with server.client.stream("POST", CHAT, json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                delta = choice["delta"]
                message["content"] = message.get("content", "") + delta.pop("content", "")
                message |= delta
                reason = choice["finish_reason"]
    return message, reason


def test_calls_that_cannot_be_read_stay_text():
    broken = "call calculator {expression"
    with serving(lambda text: broken) as server:
        message, reason = chat(server, False, messages=[QUESTION], tools=[CALCULATOR])
    assert (message["content"], reason) == (broken, "stop")


def test_more_than_may_wait_is_asked_to_come_later():
    slow = serving(lambda text: "x" * 20, seconds=0.02, most=2)
    with slow as server, ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.client.post, TEXT, json={"prompt": "1"})
        assert server.script.began.wait(5)
        second = pool.submit(server.client.post, TEXT, json={"prompt": "2", "n": 2})
        time.sleep(0.2)
        answer = server.client.post(TEXT, json={"prompt": "3"})
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert texts(first.result()) == ["x" * 20]
        assert len(texts(second.result())) == 2


def test_waits_end():
    with serving(lambda text: "x" * 90, seconds=0.05, timeout_s=0.5) as server:
        started = time.monotonic()
        answer = server.client.post(TEXT, json={"prompt": "1"})
        assert time.monotonic() - started < 3
        assert answer.status_code == 503
        assert "within 0.5 s" in answer.json()["error"]["message"]
        with server.client.stream("POST", TEXT, json={"prompt": "1", "stream": True}) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
        assert json.loads(last[6:])["error"]["type"] == "server_error"
    with serving(lambda text: "x" * 90, seconds=0.05) as server:
        with server.client.stream("POST", TEXT, json={"prompt": "1", "stream": True}) as answer:
            next(answer.iter_lines())
        started = time.monotonic()
        texts(server.client.post(TEXT, json={"prompt": "2", "max_tokens": 1}))
        assert time.monotonic() - started < 3  # of the 4.5 s that the first would have taken
        assert server.script.abandoned == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_tells_those_who_wait(stream):
    with serving(lambda text: "x" * 90, seconds=0.1) as server, ThreadPoolExecutor(1) as pool:
        asked = {"prompt": "1", "stream": stream}
        waits = pool.submit(server.client.post, TEXT, json=asked)
        assert server.script.began.wait(5)
        server.stopping.set()
        server.thread.join(3)
        assert not server.thread.is_alive()
        told = waits.result(5).text
    assert "the server is ending" in told


def test_a_failed_batch_is_reported_and_an_engine_that_died_ends_the_server():
    def reply(text):
        if text == "bad":
            raise NonFiniteError("logits of rows [0]")
        return "good"

    with serving(reply) as server:
        answer = server.client.post(TEXT, json={"prompt": "bad"})
        assert answer.status_code == 500
        assert "NonFiniteError: logits of rows" in answer.json()["error"]["message"]
        assert texts(server.client.post(TEXT, json={"prompt": "x"})) == ["good"]

    def reply(text):
        raise WorkerDiedError("policy rank 0 died")

    with serving(reply) as server:
        answer = server.client.post(TEXT, json={"prompt": "x"})
        assert answer.status_code == 500
        server.thread.join(5)
        assert [type(error) for error in server.errors] == [WorkerDiedError]
