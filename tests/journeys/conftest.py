"""The command of an installed wheel, for the journeys."""

import sys

import pytest
from first_tries import python_run


@pytest.fixture
def aligner(tmp_path, tiny_nemo, installed):
    """``aligner(*arguments)``: the finished command in an empty folder with a model."""
    (tmp_path / "tiny.nemo").symlink_to(tiny_nemo)

    def run(*arguments):
        command = [sys.executable, "-m", "aligner.commands", *arguments]
        return python_run(command, tmp_path, installed)

    return run
