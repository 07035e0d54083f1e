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
