"""Tasks of verifiers 0.4, played by the real package in real processes."""

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from played import answers_of, kwargs_of

from aligner.algorithms.ask.evaluate import evaluate
from aligner.config import EvaluateConfig, parse_config
from aligner.environments.pool import Call, EnvironmentPool
from aligner.errors import ConfigError

pytestmark = pytest.mark.extended
PACKAGES = ".venv-adapters-verifiers"  # verifiers from 0.4 on wants one version of mcp
RUN = "aligner_environments.verifiers_agent:run"


def test_the_page_s_taskset_against_our_server(folder, tiny_nemo):
    (folder / "rows.jsonl").write_text('{"idx": 1}\n{"idx": 0}\n')
    environment = {"kind": "endpoint", "factory": RUN, "kwargs": kwargs_of("verifiers_agent")}
    values = {
        "model": {"restore_from_path": str(tiny_nemo)},
        "data": {"prompts": {"source": str(folder / "rows.jsonl")}},
        "sampling": {"max_length": 6},
        "reward": {"kind": "environment"},
        "environment": {**environment, "max_tokens": 200, "concurrency": 1},
        "output": str(folder / "out"),
    }
    evaluate(parse_config(values, EvaluateConfig))
    answers = [json.loads(line) for line in (folder / "out" / "answers.jsonl").open()]
    assert len(answers) == 2
    for answer in answers:
        word = ("cat", "dog")[answer["columns"]["idx"]]
        assert f"Say {word}." in answer["prompt"]
        first, last = answer["turns"]
        assert "Once more." in first["answer"][0]["content"]
        assert (first["reward"], last["reward"], answer["end_reason"]) == (None, 0.0, "done")
        length = len(last["content"].strip())
        assert last["parts"] == {"length": length, "said_answer": 0.0}


OTHER = """
import verifiers.v1 as vf
from my_taskset import Twice, WordData

class Task(vf.Task[WordData]):
    async def setup(self, trace, runtime):
        if self.data.answer == "bad":
            raise ZeroDivisionError("of the task")

class Rewarded(Task):
    @vf.reward(weight=0.5)
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

class Others(vf.Taskset[Task]):
    INFINITE = {infinite}

    def load(self):
        for kind, answer in ((Rewarded, "good"), (Rewarded, "bad"), (Task, "none")):
            yield kind(WordData(prompt="q", answer=answer), self.config.task)

__all__ = ["Twice", "Others"]
"""


class Policy(BaseHTTPRequestHandler):
    """Says cat."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.headers["authorization"], body["messages"][0]["content"]))
        message = {"role": "assistant", "content": "cat"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "0", "object": "chat.completion", "created": 0, "model": "m"}
        said = json.dumps({**answer, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Policy) as made:
        made.seen = []
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def played(server, kwargs, *rows):
    """What came of rows (seed, columns), one after the other in one process."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with closing(EnvironmentPool(RUN, kwargs, list(rows[0][1]), runs_agents=True)) as pool:
        calls = [(url, f"key{seed}", seed, columns) for seed, columns in rows]
        return [answers_of(pool, [Call(0, "run", one, 60.0)])[0] for one in calls]


def test_tasks_rewards_and_keys(folder, server):
    chosen = played(server, {"taskset": "my_taskset"}, *[(seed, {}) for seed in range(6)])
    expected = [float(asked == "Say cat.") for _, asked in server.seen[::2]]
    assert [answer.value.score for answer in chosen] == expected
    assert set(expected) == {0.0, 1.0}
    assert [key for key, _ in server.seen[::2]] == [f"Bearer key{seed}" for seed in range(6)]


@pytest.mark.parametrize("infinite", [False, True])
def test_what_is_not_scored_and_what_fails(infinite, folder, server):
    (folder / "others.py").write_text(OTHER.format(infinite=infinite))
    rows = [{"idx": 0}, {"idx": 1}, {"idx": 2}, {"idx": None if infinite else 3}]
    good, bad, none, out = played(server, {"taskset": {"id": "others"}}, *[(1, r) for r in rows])
    assert (good.value.score, good.value.parts["turns"]) == (1.0, 2.0)
    assert "ZeroDivisionError" in bad.text
    assert "of the task" in bad.text
    assert (none.value.score, none.value.done) == (None, True)
    said = "the taskset never ends" if infinite else "idx=3 does not exist: the taskset has 3"
    assert said in out.text


def test_what_cannot_be_made_is_refused_at_once(folder):
    for kwargs, said in (
        ({}, "missing a required argument: 'taskset'"),
        ({"taskset": {}}, "environment.kwargs.taskset={} names no taskset"),
        ({"taskset": "no_such"}, "'no_such'.*not found.*current folder or on PYTHONPATH"),
        ({"taskset": "my_taskset", "agent": {"max_turn": 2}}, "agent=.*max_turn"),
    ):
        with pytest.raises(ConfigError, match=f"(?s)environment.factory='{RUN}'.*{said}"):
            EnvironmentPool(RUN, kwargs, {"idx": 0}, runs_agents=True)
