"""Temporary folders go with the processes that used them, and those of others stay."""

import os
import subprocess
import sys
import tempfile
from contextlib import closing

import pytest
from played import Game
from reward_cases import soon

from aligner.environments.pool import Failure
from aligner.errors import RewardTimeoutError
from aligner.rewards.function.runner import RewardFunction
from aligner.scratch import ScratchFolder

pytestmark = pytest.mark.integration

HOLDS = """
import os, time
from aligner.scratch import ScratchFolder
folder = ScratchFolder()
os.mkdir(os.path.join(folder.path, "held"))
print(folder.path, flush=True)
time.sleep(60)
"""
USER = """
import tempfile, time
from aligner.environments import Start

def reward(prompts, responses, ground_truths, **columns):
    open(tempfile.mkdtemp() + "/held", "w").write("x")
    time.sleep(60 if "hang" in responses else 0)
    return [0.0] * len(responses)

class Hangs:
    def __init__(self, *, seed, prompt):
        self.path = tempfile.mkdtemp()
    def init(self):
        return Start([{"role": "user", "content": "go"}])
    def step(self, message):
        open(self.path + "/held", "w").write("x")
        time.sleep(60)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The temporary directory; its name has a space."""
    folder = tmp_path / "tempo rary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def is_emptied(folder):
    return soon(lambda: not list(folder.iterdir()), 30.0)


def holder(folder):
    options = {"env": {**os.environ, "TMPDIR": str(folder)}, "start_new_session": True}
    words = [sys.executable, "-c", HOLDS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
    return process, process.stdout.readline().strip()


def test_folders_of_dead_processes_are_removed_and_no_others(here):
    (here / "aligner-scratch-file").write_text("a file of that name")
    (here / "mine").mkdir()
    os.symlink(here / "mine", here / "aligner-scratch-link")
    alive, dead = holder(here), holder(here)
    try:
        dead[0].kill()
        dead[0].wait()
        ScratchFolder().close()  # a new folder removes leftovers
        names = {"aligner-scratch-file", "mine", "aligner-scratch-link"}
        assert {path.name for path in here.iterdir()} == {*names, os.path.basename(alive[1])}
        assert os.path.isdir(os.path.join(alive[1], "held"))
    finally:
        alive[0].kill()
        alive[0].wait()


def test_chains_of_any_depth_and_closed_folders_are_removed(here):
    program = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    with closing(ScratchFolder()) as folder:
        subprocess.run([sys.executable, "-c", program], cwd=folder.path, check=True)
        os.makedirs(os.path.join(folder.path, "closed", "inner"))
        os.chmod(os.path.join(folder.path, "closed"), 0)
    assert is_emptied(here)


def test_killed_functions_and_environments_leave_no_files(here, tmp_path):
    user = tmp_path / "user.py"
    user.write_text(USER)
    with closing(RewardFunction(f"{user}:reward", time_limit_s=3.0)) as function:
        function(["p"], ["good"], [None])
        assert list(here.glob("aligner-scratch-*/*/held"))
        with pytest.raises(RewardTimeoutError):
            function(["p"], ["hang"], [None])
        assert is_emptied(here)
    with Game(f"{user}:Hangs", {}, {"prompt": "p"}) as game:
        game.begin()
        assert list(here.glob("aligner-scratch-*/*"))
        assert isinstance(game.call("step", {"content": "x"}, 1.0), Failure)
        assert is_emptied(here)
    assert is_emptied(here)
