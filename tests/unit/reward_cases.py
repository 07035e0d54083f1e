"""What the tests of reward functions share: functions in a file, scoring, ended processes."""

import shutil
import time
from pathlib import Path

import pytest

from aligner.rewards.function.runner import RewardFunction

USER_REWARDS = Path(__file__).with_name("user_rewards.py")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "user_rewards.py"
    return Path(shutil.copy(USER_REWARDS, path))


@pytest.fixture
def load(module):
    loaded = []

    def do(name, **settings):
        loaded.append(RewardFunction(f"{module}:{name}", **settings))
        return loaded[-1]

    yield do
    for function in loaded:
        function.close()


def score(function, responses, ground_truths=None, columns=None):
    prompts = [f"prompt {index}" for index in range(len(responses))]
    return function(prompts, responses, ground_truths or [None] * len(responses), columns)


def soon(condition, limit_s=60.0):
    """The value of a condition when it holds, or at the end of the time."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def gone(pid):
    def is_gone():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    return soon(is_gone, 5.0)
