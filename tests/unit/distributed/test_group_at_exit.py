"""A worker group on Ray whose owner is collected while Python ends."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
from aligner.distributed.worker_groups import RayWorkerGroup

class Front:
    def __del__(self):
        self.worker_group.shutdown()

front = Front()
front.worker_group = RayWorkerGroup.__new__(RayWorkerGroup)
"""


def test_a_front_that_is_collected_while_python_ends_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr
