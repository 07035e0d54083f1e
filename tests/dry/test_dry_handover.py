"""Weights on their way to engines on GPUs, on the dry device.

1. A worker holds and exports weights only where an engine opens them: the rest is never freed.
2. A worker that shares its device gives activations' memory back when training ends.
3. The host waits for the device before an engine reads weights and after it has copied them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="the dry device compiles a small library: needs g++ or clang++",
)
WORKER = Path(__file__).with_name("handover_worker.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    results = tmp_path_factory.mktemp("dry") / "results.json"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(results)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text())


def test_weights_are_exported_where_they_are_opened_alone(seen):
    assert seen["exports"] == {
        "nobody": [[], 0],
        "elsewhere": [[], 0],
        "here": [["GPU here"], 2 * 4096],
    }


def test_every_step_of_a_refit_waits_for_the_device(seen):
    steps = [step for step in seen["order"] if step != "release"]
    for number, step in enumerate(steps):
        if step != "synchronize":
            assert steps[number - 1] == steps[number + 1] == "synchronize", steps
    assert [step for step in steps if step != "synchronize"] == ["begin", "load", "finish"]


def test_memory_goes_back_after_training_where_the_device_is_shared(seen):
    assert seen["after_training"] == {"0": [], "1": ["release"]}
