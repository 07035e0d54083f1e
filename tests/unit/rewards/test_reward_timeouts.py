"""Reward functions that hang: the wait ends, what they started ends, other samples keep theirs."""

import os
import signal
import time

import pytest
import reward_cases
from reward_cases import gone, score

from aligner.errors import RewardTimeoutError

pytestmark = pytest.mark.integration

module, load = reward_cases.module, reward_cases.load


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


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.extended), 3])
def test_a_sample_that_hangs_takes_no_other_with_it(load, concurrency):
    options = {"timeout_reward": -1.0, "max_concurrency": concurrency}
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
