"""Environments in processes: an answer or a failure, whatever they do."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from played import Game, answers_of, say
from reward_cases import gone

from aligner import child_process
from aligner.config import PromptSourceConfig
from aligner.data.prompts import EpisodeDataset, columns_of_rows
from aligner.environments import Turn
from aligner.environments.pool import Call, CallAnswer, EnvironmentPool, Failure
from aligner.environments.protocol import check_turn
from aligner.errors import ConfigError, DataError

pytestmark = pytest.mark.integration

SAID = say("hello")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "user_environments.py"
    return shutil.copy(Path(__file__).parents[1] / "user_environments.py", path)


@pytest.fixture(scope="module")
def pool(module):
    columns = ["what", "at", "marker", "name"]
    with EnvironmentPool(f"{module}:Does", {"turns": 2}, columns) as found:
        yield found


def begin(slot, seed=1, **columns):
    return Call(slot, "begin", (seed, columns), 60.0)


def step(slot, limit=60.0):
    return Call(slot, "step", SAID, limit)


def test_conversations_in_slots_of_their_own(pool):
    started = answers_of(pool, [begin(0, name="a"), begin(1, seed=7, name="b")])
    assert [one.value.messages[0]["content"] for one in started] == ["row a", "row b"]
    first = answers_of(pool, [step(0), step(1)])
    assert [one.value for one in first] == [
        Turn([{"role": "user", "content": "you said 5"}], 1.0, False, {"seed": seed})
        for seed in (1, 7)
    ]
    (second,) = answers_of(pool, [step(1)])
    assert (second.value.done, second.value.score) == (True, 2.0)
    assert answers_of(pool, [Call(1, "close", None, 60.0)])[0].value is None
    assert pool.pid(0) != pool.pid(1) != os.getpid()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", r"raised ZeroDivisionError: of the environment .*in step"),
        ("is_killed", r"died \(exit code -9\)"),
        ("floods", r"an answer of \d{8} bytes, more than 16777216"),
        ("closes_its_pipe", r"died \(exit code 1\)"),
        ("writes_everywhere", "sent an invalid answer"),
        ("is_no_turn", "step returned .*; it must return a Turn"),
        ("is_no_number", "reward is nan, but it must be finite"),
        ("has_a_step_outside", r"steps has \(6, 1.0\). .* from 1 to 5, the number"),
    ],
)
def test_a_failure_is_told_and_touches_nobody_else(pool, what, said):
    answers_of(pool, [begin(0, what=what), begin(1)])
    other = pool.pid(1)
    failed, fine = answers_of(pool, [step(0), step(1)])
    assert isinstance(failed, Failure)
    assert failed.reason == "env_error"
    assert re.search(said, failed.text), failed.text
    assert fine.value.score == 1.0
    assert isinstance(answers_of(pool, [begin(0)])[0], CallAnswer)  # it is started again
    assert pool.pid(1) == other


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (Turn(), "neither a message nor done=True"),
        (Turn(reward=1.0, done=True, steps=[(5, None)]), "ends at 5 has no reward. Leave it out"),
        (Turn(reward="much", done=True), "reward is 'much', which is not a number"),
        (Turn(reward={"other": 1.0}, done=True), "has no key 'reward'"),
    ],
)
def test_turns_that_are_refused(turn, said):
    with pytest.raises((ConfigError, DataError), match=said):
        check_turn(turn, characters=5)


@pytest.mark.parametrize("what", ["hangs", "forks_many"])
def test_one_that_hangs_is_killed_with_what_it_started(pool, tmp_path, what):
    marker = tmp_path / "pids"
    answers_of(pool, [begin(0, what=what, marker=str(marker)), begin(1)])
    began = time.monotonic()
    failed, fine = answers_of(pool, [step(0, limit=1.0), step(1)])
    assert time.monotonic() - began < 10
    assert (failed.reason, fine.value.score) == ("env_timeout", 1.0)
    assert "did not answer within 1 seconds and was killed" in failed.text
    assert all(gone(int(pid)) for pid in marker.read_text().split())
    assert isinstance(answers_of(pool, [begin(0)])[0], CallAnswer)


@pytest.mark.parametrize("what", ["writes_half_an_answer", "writes_bytes_of_an_answer", "repeats"])
def test_a_part_of_an_answer_is_no_answer(pool, what, monkeypatch):
    """Nor is one to an earlier message; what has come of an answer is kept until the rest is."""
    monkeypatch.setattr(child_process, "_BODY_LIMIT_S", 0.5)
    answers_of(pool, [begin(0, what=what), begin(1)])
    calls = [step(0), step(1)]
    assert not any(isinstance(began, Failure) for began in pool.begin(calls))
    began, answered = time.monotonic(), set()
    while time.monotonic() < began + 1.5:
        answered |= pool.answered([slot for slot in (0, 1) if slot not in answered], 0.05)
    assert answered == {1}
    assert time.monotonic() - began < 3
    assert pool.receive(calls[1], began).value.score == 1.0
    failed = pool.receive(calls[0]._replace(limit_s=0.1), began)
    assert (failed.reason, time.monotonic() - began < 10) == ("env_timeout", True)
    assert isinstance(answers_of(pool, [begin(0)])[0], CallAnswer)


def test_an_answer_in_parts_is_one(pool):
    pool.kill(0)  # so that the numbers of its messages begin anew
    answers_of(pool, [begin(0, what="answers_in_parts")])
    call = step(0)
    (began,) = pool.begin([call])
    looks = 0
    while not pool.answered([0], 0.05):
        looks += 1
    assert looks > 3
    assert pool.receive(call, began).value.info == {"x": "y" * 2**22}
    pool.kill(0)  # it is asleep


def test_one_that_reads_nothing_is_killed_in_time(pool):
    """A message that does not fit into the buffer of a socket."""
    answers_of(pool, [begin(0)])
    os.kill(pool.pid(0), signal.SIGSTOP)
    began = time.monotonic()
    (failed,) = answers_of(pool, [Call(0, "step", say("x" * 2**23), 0.5)])
    assert (failed.reason, time.monotonic() - began < 10) == ("env_timeout", True)


def test_one_that_dies_while_it_starts_fails_its_conversation_only(pool, monkeypatch):
    answers_of(pool, [begin(0), begin(1)])
    start = child_process.ChildProcess

    def dies(program):
        process = start(program)
        os.kill(process.pid, signal.SIGKILL)
        return process

    os.kill(pool.pid(0), signal.SIGKILL)
    answers_of(pool, [step(0)])
    monkeypatch.setattr(child_process, "ChildProcess", dies)
    failed, fine = answers_of(pool, [begin(0), begin(1)])
    assert failed.reason == "env_error"
    assert re.search(r"died \(exit code -9\)", failed.text)
    assert isinstance(fine, CallAnswer)
    monkeypatch.undo()
    assert isinstance(answers_of(pool, [begin(0)])[0], CallAnswer)


def test_memory_is_bounded_and_a_tool_that_misbehaves_tells_the_policy(module):
    with EnvironmentPool(f"{module}:Does", {}, ["what"], memory_mb=256) as pool:
        answers_of(pool, [begin(0, what="eats_memory")])
        (failed,) = answers_of(pool, [step(0)])
    assert "raised MemoryError" in failed.text
    assert failed.text.endswith("It may allocate environment.memory_mb=256 MiB")
    cases = (
        ("floods", "result of misbehave: Turn(messages=[{'role': 'user', 'content': 'xxx"),
        ("eats_memory", "result of misbehave: error: MemoryError"),
        ("raises", "result of misbehave: error: ZeroDivisionError: of the environment"),
    )
    with EnvironmentPool(f"{module}:Tools", {}, ["marker"], memory_mb=512) as pool:
        answers_of(pool, [begin(0, marker="")])
        for how, said in cases:
            call = say(f'call misbehave {{"how": "{how}"}}')
            (answer,) = answers_of(pool, [Call(0, "step", call, 60.0)])
            text = answer.value.messages[0]["content"]
            assert text.startswith(said)
            assert len(text) < 4100


@pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux")
def test_where_memory_runs_out_environments_go_first(pool):
    answers_of(pool, [begin(0)])
    assert Path(f"/proc/{pool.pid(0)}/oom_score_adj").read_text().strip() == "1000"


def test_what_was_left_under_way_is_closed_and_coroutines_share_a_loop(module, tmp_path):
    with EnvironmentPool(f"{module}:Closes", {}, ["marker"]) as pool:
        for number in range(3):
            answers_of(pool, [begin(0, seed=number, marker=str(tmp_path / "closed"))])
            assert isinstance(answers_of(pool, [step(0)])[0], CallAnswer)
    assert (tmp_path / "closed").read_text() == "0 1 "
    with Game(f"{module}:Async", {}) as game:
        game.begin()
        assert [game.say("hello").score for _ in range(2)] == [1.0, 2.0]
        assert game.call("close").value is None


def test_forks_answer_nothing_and_dead_ones_leave_nothing(pool, tmp_path):
    answers_of(pool, [begin(0, what="forks")])
    assert [answers_of(pool, [step(0)])[0].value.score for _ in range(2)] == [1.0, 2.0]
    # Nor does it where its children are no longer its own when it is found dead.
    marker = tmp_path / "pids"
    answers_of(pool, [begin(0, what="dies_alone", marker=str(marker))])
    (failed,) = answers_of(pool, [step(0)])
    assert re.search(r"died \(exit code -9\)", failed.text)
    assert gone(int(marker.read_text()))


@pytest.mark.parametrize(
    ("name", "kwargs", "columns", "said"),
    [
        ("Missing", {}, [], "has no class 'Missing'"),
        ("NoStep", {}, [], "has no method step"),
        ("NoStep", {"other": 1}, [], "has no method step"),
        ("Echo", {"turns": 1}, ["turns"], "turns would be given twice"),
        ("Echo", {}, ["seed"], "seed would be given twice"),
        ("Echo", {}, ["self"], "self would be given twice"),
        ("ToolEnv", {}, ["prompt"], r"is made with seed, the columns .*\*\*columns"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_once(module, name, kwargs, columns, said):
    with pytest.raises(ConfigError, match=rf"environment.factory=.*{said}"):
        EnvironmentPool(f"{module}:{name}", kwargs, columns)


def test_a_row_that_lacks_a_column_is_named_at_once(tmp_path):
    """Training rows have a word and a level; one of validation has no level."""
    (tmp_path / "mine.py").write_text(
        "class Game:\n"
        "    def __init__(self, seed, level, word=None): ...\n"
        "    def init(self): ...\n"
        "    def step(self, message): ...\n"
        "def agent(base_url, api_key, seed, level, **columns): ...\n"
    )
    (tmp_path / "a.jsonl").write_text('{"level": 1, "word": "a"}\n{"level": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"level": null}\n{"word": "b"}\n')
    train, held_out = (
        EpisodeDataset.read(PromptSourceConfig(str(tmp_path / name)), 10, None)
        for name in ("a.jsonl", "b.jsonl")
    )
    fine = columns_of_rows({"data.train": train, "data.validation": None})
    assert fine == {"level": None, "word": "row 1 of data.train"}
    EnvironmentPool(f"{tmp_path}/mine.py:Game", {}, fine).close()
    lacking = columns_of_rows({"data.train": train, "data.validation": held_out})
    assert lacking["level"] == "row 1 of data.validation"
    said = r"row 1 of data.validation has no 'level': missing a required argument: 'level'"
    for name, runs_agents in (("Game", False), ("agent", True)):
        with pytest.raises(ConfigError, match=said):
            EnvironmentPool(f"{tmp_path}/mine.py:{name}", {}, lacking, runs_agents=runs_agents)


DIES_WHILE_KILLING = """
import os, signal
from aligner import process_tree
from aligner.child_process import ChildProcess, Program
from aligner.errors import DataError

process = ChildProcess(Program("sleeper", (), "a child", "", DataError, DataError))
print(process.wait_until_ready(), flush=True)
process_tree._kill_all = lambda list_processes: os.kill(os.getpid(), signal.SIGKILL)
process.close()
"""


def test_a_child_ends_if_its_parent_dies_while_it_kills_the_child(tmp_path):
    """Between the signal that stops the child and the one that kills it."""
    load = "import os\n\ndef load():\n    return os.getpid(), lambda: ()\n"
    (tmp_path / "sleeper.py").write_text(load)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", DIES_WHILE_KILLING]
    parent = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    assert gone(int(parent.stdout))


def test_child_processes_stay_light():
    program = (
        "import sys, aligner.environments.worker, aligner.environments.tools;"
        "import aligner.rewards.function.execution;"
        "from aligner_environments import gymnasium, mcp, nemo_rl, openenv;"
        "from aligner_environments import skyrl_gym, trl, verifiers, verifiers_agent;"
        "import aligner.examples.tasks.games;"
        "heavy = {'torch', 'numpy', 'transformers', 'ray', 'omegaconf'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
