"""Reward functions in processes: an answer or a refusal, whatever they do."""

import os
import signal
import subprocess
import sys
import time

import pytest
import reward_cases
from reward_cases import gone, score

from aligner.errors import RewardError

pytestmark = pytest.mark.integration

module, load = reward_cases.module, reward_cases.load


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
