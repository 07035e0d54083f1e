"""Reward functions in processes: an answer or a refusal, whatever they do."""

import os
import signal
import subprocess
import sys

import pytest
import reward_cases
from reward_cases import gone, score

from aligner.errors import RewardError
from aligner.rewards.function.runner import RewardFunction

pytestmark = pytest.mark.integration

module, load = reward_cases.module, reward_cases.load


def test_a_function_that_forks_answers_once(load):
    """The copy's answer to one batch is not taken for the answer to the next."""
    function = load("forks")
    for responses in (["1", "2"], ["3", "4"], ["5"], ["6", "7", "8"]):
        assert score(function, responses).rewards.tolist() == [float(text) for text in responses]


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


def test_crash_is_told_and_survived(load):
    function = load("crashes")
    with pytest.raises(RewardError, match=r"died \(exit code -9\)"):
        score(function, ["crash"])
    assert score(function, ["fine"]).rewards.tolist() == [1.0]
    with pytest.raises(RewardError, match=r"died \(exit code 3\)"):
        score(load("leaves"), ["x"])


def test_closing_ends_the_process(module):
    runner = RewardFunction(f"{module}:lengths")
    (process,) = runner._processes.values()
    assert process.alive
    runner.close()
    process.close()
    assert not process.alive
    assert gone(process.pid)


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


def test_child_processes_stay_light():
    program = (
        "import sys, aligner.rewards.function.execution;"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
