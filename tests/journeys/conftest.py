"""The command of an installed wheel, for the journeys."""

import sys

import pytest
from first_tries import python_run


@pytest.fixture
def aligner(tmp_path, tiny_nemo, installed):
    """``aligner(*arguments)``: the finished command in an empty folder with a model.

    It fails the test if the exit status is not ``code``.
    """
    (tmp_path / "tiny.nemo").symlink_to(tiny_nemo)

    def run(*arguments, code=0):
        command = [sys.executable, "-m", "aligner.commands", *arguments]
        done = python_run(command, tmp_path, installed)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
