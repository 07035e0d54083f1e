"""Two processes in every layout give one process's numbers: forward, gradient norm, after updates.

Float32 rounding differs with the order of sums; after two updates the difference stays within
1e-5 of the largest value.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("layout_worker.py")
LAYOUTS = {
    "data 2": "1,1,0",
    "tensor 2 + sequence": "2,1,1",
    "tensor 2": "2,1,0",
    "pipe 2": "1,2,0",
}


def launch(processes, model, output, layouts):
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(processes), str(WORKER)),
            *(str(model), str(output), *layouts),
        ],
        check=True,
        timeout=240,
        capture_output=True,
    )
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    one = launch(1, tiny_nemo, folder / "one.pt", ["1,1,0"])
    return one["1,1,0"], launch(2, tiny_nemo, folder / "two.pt", LAYOUTS.values())


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, role, seen):
    one, two = seen[0][role], seen[1][LAYOUTS[layout]][role]
    for key in ("before", "after"):
        scale = one[key].abs().max().clamp(min=1e-3)
        assert (one[key] - two[key]).abs().max() / scale < 1e-5, key
    assert (one["after"] - one["before"]).abs().max() > 1e-4  # there was something to compare
    for single, double in zip(one["updates"], two["updates"], strict=True):
        assert single.keys() == double.keys()
        for name, value in single.items():
            assert double[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
