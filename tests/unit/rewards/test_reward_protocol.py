"""Reward functions in processes: what they are given and may return, and what ends them."""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import reward_cases
import torch
from reward_cases import gone, score

from aligner.errors import ConfigError, DataError, RewardError
from aligner.rewards.function.runner import RewardFunction
from aligner.rewards.protocol import Samples, parse_scores

pytestmark = pytest.mark.integration

module, load = reward_cases.module, reward_cases.load


def test_numbers_and_dicts_become_rewards_and_metrics(load):
    output = score(load("lengths"), ["a", "bcd", ""])
    assert output.rewards.tolist() == [1.0, 3.0, 0.0]
    assert output.rewards.dtype == torch.float32
    assert output.parts == {}
    assert score(load("lengths"), []).rewards.shape == (0,)
    assert score(load("slowly"), ["a", "b"], ["a", "c"]).rewards.tolist() == [1.0, 0.0]
    columns = {"level": [1, 2, 3], "is_end": [True, False, True]}
    for concurrency, sizes in [(1, [3, 3, 3]), (2, [1, 2, 2])]:
        output = score(load("detailed", max_concurrency=concurrency), ["x"] * 3, columns=columns)
        assert output.rewards.tolist() == [1.0, 2.0, 3.0]
        assert output.parts == {"ended": [1.0, 0.0, 1.0], "n": sizes}


def test_columns_and_ground_truths_that_a_function_names(load):
    columns = {"level": [1, 2], "unused": [0, 0], "scale": ["no", "no"]}
    function = load("picky", kwargs={"scale": 10})
    assert score(function, ["x"] * 2, columns=columns).rewards.tolist() == [10.0, 20.0]
    with pytest.raises(DataError, match=r"needs the columns \['level'\].*found: \['unused'\]"):
        score(function, ["x"] * 2, columns={"unused": [0, 0]})
    function.signature.check_columns({"level"})
    with pytest.raises(DataError, match="level"):
        function.signature.check_columns(set())
    for name in ("truths_in_columns", "truths_by_keyword"):
        scored = score(load(name), ["x", "y"], [3.0, 5.0], columns={"level": [1, 2]})
        assert scored.rewards.tolist() == [3.0, 5.0]


def test_exceptions_name_the_sample_that_caused_them(load):
    function = load("divides")
    with pytest.raises(RewardError) as refusal:
        score(function, ["1", "2", "0", "no number"])
    text = str(refusal.value)
    assert "divides" in text
    assert "ZeroDivisionError: division by zero (" in text  # and file and line
    assert "on sample 2 (prompt 'prompt 2', response '0')" in text
    assert score(function, ["4"]).rewards.tolist() == [0.25]  # and it goes on
    with pytest.raises(RewardError, match=r"sample 3 \(prompt 'prompt 3'"):
        score(load("divides", max_concurrency=2), ["1", "2", "4", "0"])
    with pytest.raises(RewardError, match=r"too many .* on the batch as a whole"):
        score(load("only_whole_batches"), ["a", "b"])
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"RuntimeError: first .* on the batch as a whole"):
        score(load("fails_then_hangs", time_limit_s=1.0), ["a", "b"])
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:missing", r"has no function 'missing'\. Its functions: .*lengths"),
        ("{module}:not_callable", "has no function 'not_callable'"),
        ("{module}:too_few", r"must take \(prompts, responses, ground_truths"),
        ("{module}:two_lists", "ground_truths"),
        ("nowhere.py:f", "does not exist"),
        ("no.such.module:f", "no module named 'no'"),
        ("plain", "is not an import path"),
        ("{folder}/broken.py:f", "failed with ZeroDivisionError"),
    ],
)
def test_functions_that_cannot_be_loaded(module, name, message):
    (module.parent / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        RewardFunction(name.format(module=module, folder=module.parent))
    with pytest.raises(ConfigError, match=r"contains \['size'\].* accepts .*scale"):
        RewardFunction(f"{module}:picky", kwargs={"size": 3})


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "returned 1 rewards for 2 samples"),
        (None, "must return a list of numbers or of dicts, got NoneType"),
        ([1.0, math.nan], r"sample 1 \(prompt 'q', response 's'\): reward is nan"),
        ([math.inf, 1.0], r"sample 0 .*: reward is inf"),
        ([1.0, "1"], "reward is '1', which is not a number"),
        ([1.0, None], "reward is None, which is not a number"),
        ([{"reward": 1}, 1.0], "sample 1 .* mixed"),
        ([{"score": 1}, {"score": 1}], "has no key 'reward', only ..score"),
        ([{"reward": 1, "x": 2}, {"reward": 1}], r"sample 1 .* first sample's has \['reward', 'x'"),
        ([{"reward": 1, "x": 2}, {"reward": 1, "x": "b"}], "sample 1 .*: x is 'b'"),
        ([1.0, 1e300], r"sample 1 .*: reward is 1e\+300, but it must be finite in float32"),
        ([3.5e38, 1.0], r"sample 0 .*: reward is 3\.5e\+38, but it must be finite in float32"),
        ([1.0, 10**400], r"sample 1 .*: reward is 1000.*…, but it must be finite"),
        ([1.0, 10**5000], r"sample 1 .*: reward is a int, but it must be finite"),
    ],
)
def test_scores_that_are_refused(scores, message):
    samples = Samples(["p", "q"], ["r", "s"], [None, None])
    with pytest.raises(RewardError, match=message):
        parse_scores(scores, samples, "f")


def test_numbers_of_any_kind_and_size():
    samples = Samples(["p", "q"], ["r", "s"], [None, None])
    for scores in ((1, True), np.ones(2), torch.ones(2), [np.float32(1), torch.tensor(1)]):
        assert parse_scores(scores, samples, "f") == ([1.0, 1.0], {})
    largest = torch.finfo(torch.float32).max
    samples = Samples(["p"] * 3, ["r"] * 3, [None] * 3)
    rewards, _ = parse_scores([largest, -largest, 1e-320], samples, "f")
    assert torch.tensor(rewards).tolist() == [largest, -largest, 0.0]


def test_bad_lists_and_long_texts():
    with pytest.raises(RewardError, match="responses has 1 entries for 2 prompts"):
        Samples(["p", "q"], ["r"], [None, None])
    with pytest.raises(RewardError, match="level has 3 entries for 2 prompts"):
        Samples(["p", "q"], ["r", "s"], [None, None], {"level": [1, 2, 3]})
    text = Samples(["x" * 100 + "end"], ["start" + "y" * 100], [None]).describe(0)
    assert "end'" in text
    assert "'start" in text
    assert len(text) < 220


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("base", "raised BaseException: base"),
        ("interrupt", "raised KeyboardInterrupt: "),
        ("exit", "raised GeneratorExit: g"),
        ("odd", r"raised Odd: \(the text is not available: RuntimeError\)"),
        ("huge", r"raised ValueError: z+… and 4998000 characters more"),
    ],
)
def test_whatever_is_raised_the_sample_is_named(load, response, said):
    function = load("raises")
    with pytest.raises(RewardError, match=rf"{said}.* on sample 1 \(prompt 'prompt 1'") as refusal:
        score(function, ["a", response, "b"])
    assert len(str(refusal.value)) < 3000
    assert score(function, ["a"]).rewards.tolist() == [0.0]


def test_answers_are_bounded_and_of_this_library(load):
    with pytest.raises(RewardError, match="of my own") as refusal:  # a class of the user's file
        score(load("raises"), ["own"])
    assert type(refusal.value) is RewardError
    with pytest.raises(RewardError, match=r"reward is 'yyy.*…, which is not a number") as refusal:
        score(load("returns_much"), ["x"])
    assert len(str(refusal.value)) < 400
    invalid = r"sent an invalid answer \((JSON|Unicode)DecodeError\)|died"
    with pytest.raises(RewardError, match=invalid):
        score(load("writes_everywhere"), ["x"])


def test_parts_run_at_the_same_time_in_processes_of_their_own(load):
    function = load("naps", max_concurrency=3)
    score(function, ["x"] * 3)  # starts them
    pids = score(function, ["x"] * 7).rewards.tolist()
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 3]


@pytest.mark.parametrize("ending", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_this_one(module, tmp_path, ending):
    marker = tmp_path / "pids"
    program = f"""
import os, signal, sys, threading, time
from pathlib import Path
from aligner.rewards.function.runner import RewardFunction
function = RewardFunction("{module}:hangs", time_limit_s=500)
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


def test_a_sample_that_hangs_takes_no_other_with_it(load):
    options = {"timeout_reward": -1.0, "max_concurrency": 3}
    function = load("hangs_on_some", time_limit_s=8.0, **options)
    responses = ["a", "bb", "c", "d", "ee", "f", "hang", "g"]
    scored = score(function, responses)
    assert scored.rewards.tolist() == [2, 3, 2, 2, 3, 2, -1, 2]
    assert scored.parts == {"n": [1, 1, 1, 1, 1, 1, 0, 1]}
    assert scored.timeouts == 1
    assert score(function, ["a"]).timeouts == 0


def test_where_all_hang_the_wait_ends(load):
    function = load("hangs_on_some", time_limit_s=0.5, timeout_reward=0.25)
    start = time.monotonic()
    scored = score(function, ["hang"] * 64)
    assert time.monotonic() - start < 30
    assert scored.rewards.tolist() == [0.25] * 64
    assert (scored.timeouts, scored.parts) == (64, {})
