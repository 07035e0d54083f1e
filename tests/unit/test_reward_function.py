"""Reward functions in processes and threads: results, refusals, time limits, no orphans."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.data.importing import load_function
from aligner.errors import ConfigError, DataError, RewardError, RewardTimeoutError
from aligner.rewards.function import RewardFunction
from aligner.rewards.processes import RewardProcess
from aligner.rewards.protocol import Samples, Signature, parse_scores

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
from aligner.errors import RewardError

def lengths(prompts, responses, ground_truths):
    return [len(r) for r in responses]

async def slowly(prompts, responses, ground_truths):
    await asyncio.sleep(0.01)
    return [float(r == g) for r, g in zip(responses, ground_truths)]

def detailed(prompts, responses, ground_truths, **columns):
    assert set(columns) == {"level", "is_end"}, columns
    return [{"reward": l, "ended": e, "n": len(prompts)}
            for l, e in zip(columns["level"], columns["is_end"])]

def picky(prompts, responses, ground_truths, level, *, scale, other=None):
    assert other is None
    return [l * scale for l in level]

def divides(prompts, responses, ground_truths):
    return [1 / int(r) for r in responses]

def only_whole_batches(prompts, responses, ground_truths):
    if len(prompts) > 1:
        raise RuntimeError("too many")
    return [0.0]

def fails_then_hangs(prompts, responses, ground_truths):
    if len(prompts) == 1:
        time.sleep(1000)
    raise RuntimeError("first")

def hangs(prompts, responses, ground_truths):
    with open(ground_truths[0], "w") as file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        file.write(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(1000)

def hangs_on_some(prompts, responses, ground_truths):
    while "hang" in responses:
        time.sleep(1000)
    return [{"reward": 1.0 + len(r), "n": 1.0} for r in responses]

def naps(prompts, responses, ground_truths):
    time.sleep(0.4)
    return [float(os.getpid())] * len(prompts)

def crashes(prompts, responses, ground_truths):
    if responses[0] == "crash":
        os.kill(os.getpid(), 9)
    return [1.0] * len(prompts)

def leaves(prompts, responses, ground_truths):
    sys.exit(3)

def forks(prompts, responses, ground_truths):
    os.fork()
    return [float(r) for r in responses]

def hangs_with_a_daemon(prompts, responses, ground_truths):
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    started = [subprocess.Popen(command, start_new_session=True, env={}).pid]
    reading, writing = os.pipe()
    if os.fork() == 0:  # the usual way to be a daemon: nobody is its parent any more
        os.setsid()
        daemon = os.fork()
        if daemon:
            os.write(writing, str(daemon).encode())
            os._exit(0)
        time.sleep(1000)
        os._exit(0)
    started.append(int(os.read(reading, 20)))
    with open(ground_truths[0], "w") as file:
        file.write(" ".join(map(str, [os.getpid(), *started])))
    time.sleep(1000)

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Own(RewardError):
    pass

RAISED = {
    "base": BaseException("base"), "interrupt": KeyboardInterrupt(), "exit": GeneratorExit("g"),
    "odd": Odd(), "huge": ValueError("z" * 5_000_000), "own": Own("of my own")}

def raises(prompts, responses, ground_truths):
    for response in responses:
        if response in RAISED:
            raise RAISED[response]
    return [0.0] * len(prompts)

def returns_much(prompts, responses, ground_truths):
    return ["y" * 5_000_000] * len(prompts)

def writes_everywhere(prompts, responses, ground_truths):
    for number in range(3, 500):
        try:
            os.write(number, b"\\0\\0\\0\\5junk!")
        except OSError:
            pass
    return [1.0] * len(prompts)

def too_few(prompts, responses):
    return []

not_callable = 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "user_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def load(module):
    loaded = []

    def do(name, **settings):
        loaded.append(RewardFunction.load(f"{module}:{name}", **settings))
        return loaded[-1]

    yield do
    for function in loaded:
        function.close()


def score(function, responses, ground_truths=None, columns=None):
    prompts = [f"prompt {index}" for index in range(len(responses))]
    return function(prompts, responses, ground_truths or [None] * len(responses), columns)


def gone(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_numbers(load):
    output = score(load("lengths"), ["a", "bcd", ""])
    assert output.rewards.tolist() == [1.0, 3.0, 0.0]
    assert output.rewards.dtype == torch.float32
    assert output.metrics == {}
    assert score(load("lengths"), []).rewards.shape == (0,)


def test_async(load):
    assert score(load("slowly"), ["a", "b"], ["a", "c"]).rewards.tolist() == [1.0, 0.0]

    async def here(prompts, responses, ground_truths):
        return [2.0] * len(prompts)

    assert score(RewardFunction.wrap(here), ["a"]).rewards.tolist() == [2.0]


def test_dicts_become_metrics(load):
    columns = {"level": [1, 2, 3], "is_end": [True, False, True]}
    for concurrency, sizes in [(1, [3, 3, 3]), (2, [1, 2, 2])]:
        output = score(load("detailed", max_concurrency=concurrency), ["x"] * 3, columns=columns)
        assert output.rewards.tolist() == [1.0, 2.0, 3.0]
        assert output.metrics == {"ended": [1.0, 0.0, 1.0], "n": sizes}


def test_only_the_columns_it_names(load):
    columns = {"level": [1, 2], "unused": [0, 0], "scale": ["no", "no"]}
    function = load("picky", kwargs={"scale": 10})
    assert score(function, ["x"] * 2, columns=columns).rewards.tolist() == [10.0, 20.0]
    with pytest.raises(DataError, match=r"needs the columns \['level'\].*found: \['unused'\]"):
        score(function, ["x"] * 2, columns={"unused": [0, 0]})
    function.check_columns({"level"})
    with pytest.raises(DataError, match="level"):
        function.check_columns(set())


@pytest.mark.parametrize("where", ["process", "thread"])
def test_exception_names_the_sample(load, where):
    def divides(prompts, responses, ground_truths):
        return [1 / int(response) for response in responses]

    function = load("divides") if where == "process" else RewardFunction.wrap(divides)
    with pytest.raises(RewardError) as refusal:
        score(function, ["1", "2", "0", "no number"])
    text = str(refusal.value)
    assert "divides" in text
    assert "ZeroDivisionError: division by zero (" in text  # and file and line
    assert "on sample 2 (prompt 'prompt 2', response '0')" in text
    assert score(function, ["4"]).rewards.tolist() == [0.25]  # and it goes on


def test_sample_number_counts_in_the_whole_batch(load):
    with pytest.raises(RewardError, match=r"sample 3 \(prompt 'prompt 3'"):
        score(load("divides", max_concurrency=2), ["1", "2", "4", "0"])


def test_exception_no_single_sample_causes(load):
    with pytest.raises(RewardError, match=r"too many .* on the batch as a whole"):
        score(load("only_whole_batches"), ["a", "b"])
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"RuntimeError: first .* on the batch as a whole"):
        score(load("fails_then_hangs", time_limit_s=1.0), ["a", "b"])
    assert time.monotonic() - start < 30


def test_hanging_function_is_killed_with_its_children(load, tmp_path):
    function = load("hangs", time_limit_s=2.0)
    with pytest.raises(RewardTimeoutError, match=r"hangs' did not answer within 2 seconds"):
        score(function, ["x"], [str(tmp_path / "pids")])
    assert isinstance(RewardTimeoutError(""), TimeoutError)
    for pid in (tmp_path / "pids").read_text().split():
        assert gone(int(pid))


def test_what_left_the_session_is_killed_too(load, tmp_path):
    """A grandchild with a session and an environment of its own, and a daemon of two forks."""
    marker = tmp_path / "pids"
    with pytest.raises(RewardTimeoutError):
        score(load("hangs_with_a_daemon", time_limit_s=2.0), ["x"], [str(marker)])
    pids = [int(pid) for pid in marker.read_text().split()]
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 3
    assert left == []


def test_a_function_that_forks_answers_once(load):
    """The copy's answer to one batch is not taken for the answer to the next."""
    function = load("forks")
    for responses in (["1", "2"], ["3", "4"], ["5"], ["6", "7", "8"]):
        assert score(function, responses).rewards.tolist() == [float(text) for text in responses]


@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("base", "raised BaseException: base"),
        ("interrupt", "raised KeyboardInterrupt: "),
        ("exit", "raised GeneratorExit: g"),
        ("odd", r"raised Odd: \(its text cannot be had: RuntimeError\)"),
        ("huge", r"raised ValueError: z+… and 4998000 characters more"),
    ],
)
def test_whatever_is_raised_the_sample_is_named(load, module, where, response, said):
    function = load("raises")
    if where == "thread":
        function = RewardFunction.wrap(load_function(f"{module}:raises", key="reward.function"))
    with pytest.raises(RewardError, match=rf"{said}.* on sample 1 \(prompt 'prompt 1'") as refusal:
        score(function, ["a", response, "b"])
    assert len(str(refusal.value)) < 3000
    assert score(function, ["a"]).rewards.tolist() == [0.0]


def test_answers_are_bounded_and_of_this_library(load):
    with pytest.raises(RewardError, match="of my own") as refusal:  # a class of the user's file
        score(load("raises"), ["own"])
    assert type(refusal.value) is RewardError
    with pytest.raises(
        RewardError, match=r"reward is 'yyy.*\.\.\., which is not a number"
    ) as refusal:
        score(load("returns_much"), ["x"])
    assert len(str(refusal.value)) < 400
    with pytest.raises(RewardError, match=r"sent what is no answer \(UnpicklingError\)|died"):
        score(load("writes_everywhere"), ["x"])


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_sample_that_hangs_takes_no_other_with_it(load, concurrency):
    function = load(
        "hangs_on_some", time_limit_s=3.0, timeout_reward=-1.0, max_concurrency=concurrency
    )
    responses = ["a", "bb", "c", "d", "ee", "f", "hang", "g"]
    scored = score(function, responses)
    assert scored.rewards.tolist() == [2, 3, 2, 2, 3, 2, -1, 2]
    assert scored.metrics == {"n": [1, 1, 1, 1, 1, 1, 0, 1]}
    assert scored.timeouts == 1
    assert score(function, ["a"]).timeouts == 0


def test_where_all_hang_the_wait_ends(load):
    function = load("hangs_on_some", time_limit_s=0.5, timeout_reward=0.25)
    start = time.monotonic()
    scored = score(function, ["hang"] * 64)
    assert time.monotonic() - start < 30
    assert scored.rewards.tolist() == [0.25] * 64
    assert (scored.timeouts, scored.metrics) == (64, {})


def test_hanging_thread_is_left_behind():
    release = threading.Event()

    def waits(prompts, responses, ground_truths):
        release.wait()
        return [0.0]

    start = time.monotonic()
    with pytest.raises(RewardTimeoutError, match=r"within 0.2 seconds"):
        score(RewardFunction.wrap(waits, time_limit_s=0.2), ["x"])
    assert time.monotonic() - start < 10
    release.set()


def test_parts_run_at_the_same_time_in_processes_of_their_own(load):
    function = load("naps", max_concurrency=3)
    score(function, ["x"] * 3)  # starts them
    pids = score(function, ["x"] * 7).rewards.tolist()
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 3]


def test_crash_is_told_and_survived(load):
    function = load("crashes")
    with pytest.raises(RewardError, match=r"died \(exit code -9\)"):
        score(function, ["crash"])
    assert score(function, ["fine"]).rewards.tolist() == [1.0]
    with pytest.raises(RewardError, match=r"died \(exit code 3\)"):
        score(load("leaves"), ["x"])


def test_closing_ends_the_process(module):
    process = RewardProcess(f"{module}:lengths", {})
    assert process.alive
    process.close()
    process.close()
    assert not process.alive
    assert gone(process.pid)


@pytest.mark.parametrize("ending", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_this_one(module, tmp_path, ending):
    marker = tmp_path / "pids"
    program = f"""
import os, signal, sys, threading, time
from pathlib import Path
from aligner.rewards.function import RewardFunction
function = RewardFunction.load("{module}:hangs", time_limit_s=500)
threading.Thread(
    target=function, args=(["p"], ["r"], ["{marker}"]), daemon=True).start()
while not (Path("{marker}").exists() and len(Path("{marker}").read_text().split()) == 2):
    time.sleep(0.05)
{ending}
"""
    subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    try:
        for pid in marker.read_text().split():
            assert gone(int(pid))
    finally:
        for pid in marker.read_text().split():
            if not gone(int(pid)):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:missing", r"has no function 'missing' \(its functions: .*lengths"),
        ("{module}:not_callable", "has no function 'not_callable'"),
        ("{module}:too_few", r"must take \(prompts, responses, ground_truths"),
        ("nowhere.py:f", "there is no file"),
        ("no.such.module:f", "no module named 'no'"),
        ("plain", "must look like"),
        ("{folder}/broken.py:f", "failed with ZeroDivisionError"),
    ],
)
def test_functions_that_cannot_be_loaded(module, name, message):
    (module.parent / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        RewardFunction.load(name.format(module=module, folder=module.parent))


def test_settings_that_cannot_work(module, load):
    with pytest.raises(ConfigError, match="time_limit_s=0"):
        load("lengths", time_limit_s=0)
    with pytest.raises(ConfigError, match="max_concurrency=0"):
        load("lengths", max_concurrency=0)
    with pytest.raises(ConfigError, match=r"no keyword arguments \['size'\]; it has .*scale"):
        load("picky", kwargs={"size": 3})


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "returned 1 rewards for 2 samples"),
        (None, "must return a list of numbers or of dicts, got NoneType"),
        ({"reward": 1}, "got dict"),
        ([1.0, math.nan], r"sample 1 \(prompt 'q', response 's'\): reward is nan"),
        ([math.inf, 1.0], r"sample 0 .*: reward is inf"),
        ([1.0, "1"], "reward is '1', which is not a number"),
        ([1.0, None], "reward is None, which is not a number"),
        ([1.0, {"reward": 1}], "sample 1 .* mixed"),
        ([{"reward": 1}, 1.0], "sample 1 .* mixed"),
        ([{"score": 1}, {"score": 1}], "has no key 'reward', only ..score"),
        ([{"reward": 1, "x": 2}, {"reward": 1}], r"sample 1 .* first sample's has \['reward', 'x'"),
        ([{"reward": 1, "x": 2}, {"reward": 1, "x": "b"}], "sample 1 .*: x is 'b'"),
        ([{"reward": 1, "x": math.nan}] * 2, "x is nan"),
        ([1.0, 1e300], r"sample 1 .*: reward is 1e\+300, which is infinite in float32"),
        ([3.5e38, 1.0], r"sample 0 .*: reward is 3\.5e\+38, which is infinite in float32"),
        ([1.0, -1e39], r"sample 1 .*: reward is -1e\+39, which is infinite"),
        ([1.0, 10**400], r"sample 1 .*: reward is 1000.*\.\.\., which is infinite"),
        ([1.0, 10**5000], r"sample 1 .*: reward is a int, which is infinite"),
    ],
)
def test_scores_that_are_refused(scores, message):
    samples = Samples(["p", "q"], ["r", "s"], [None, None])
    with pytest.raises(RewardError, match=message):
        parse_scores(scores, samples, "f")
    wrapped = RewardFunction.wrap(lambda prompts, responses, ground_truths: scores)
    with pytest.raises(RewardError, match=message):
        wrapped(samples.prompts, samples.responses, samples.ground_truths)


@pytest.mark.parametrize(
    "scores",
    [(1, True), np.array([1.0, 1.0]), torch.ones(2), [np.float32(1), torch.tensor(1)]],
)
def test_numbers_of_any_kind(scores):
    samples = Samples(["p", "q"], ["r", "s"], [None, None])
    assert parse_scores(scores, samples, "f") == ([1.0, 1.0], {})


def test_the_largest_and_smallest_numbers_of_float32_are_rewards():
    largest = torch.finfo(torch.float32).max
    wrapped = RewardFunction.wrap(lambda prompts, *_: [largest, -largest, 1e-320])
    assert wrapped(["p"] * 3, ["r"] * 3, [None] * 3).rewards.tolist() == [largest, -largest, 0.0]


def test_lists_of_different_lengths_are_refused():
    function = RewardFunction.wrap(lambda prompts, responses, ground_truths: [1.0, 1.0])
    with pytest.raises(RewardError, match="responses has 1 entries for 2 prompts"):
        function(["p", "q"], ["r"], [None, None])
    with pytest.raises(RewardError, match="level has 3 entries for 2 prompts"):
        function(["p", "q"], ["r", "s"], [None, None], {"level": [1, 2, 3]})


def test_long_texts_are_shortened_in_messages():
    text = Samples(["x" * 100 + "end"], ["start" + "y" * 100], [None]).describe(0)
    assert "end'" in text
    assert "'start" in text
    assert len(text) < 220


def test_signature():
    def function(prompts, responses, ground_truths, level, extra=None, *, strict, **rest):
        return []

    signature = Signature.of(function, "f", {"strict": True})
    assert signature.required == ("level",)
    assert set(signature.named) == {"level", "extra"}
    assert signature.takes_all
    chosen = signature.select({"level": [1], "other": [2], "strict": [3]}, {"strict"})
    assert chosen == {"level": [1], "other": [2]}


def test_child_processes_stay_light():
    program = (
        "import sys, aligner.rewards.worker;"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
