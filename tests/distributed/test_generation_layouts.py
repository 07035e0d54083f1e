"""Two processes in every layout generate one process's tokens, on both ranks.

A tensor-parallel product is summed in another order, so log-probs agree to rounding.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("generation_worker.py")
LAYOUTS = {"data 2": "1,0", "tensor 2": "2,0", "tensor 2 + sequence": "2,1"}


def launch(processes, model, output, layouts):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(processes), str(WORKER)),
            *(str(model), str(output), *layouts),
        ],
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    one = launch(1, tiny_nemo, folder / "one.pt", ["1,0"])
    return one[0]["1,0"], launch(2, tiny_nemo, folder / "two.pt", LAYOUTS.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, seen):
    one, ranks = seen
    made = one["lengths"] - one["prompt_lengths"]
    assert len(set(made.tolist())) > 2
    for rank in ranks:
        two = rank[LAYOUTS[layout]]
        for key in ("tokens", "lengths", "is_end"):
            assert torch.equal(two[key], one[key]), key
        assert torch.allclose(two["logprobs"], one["logprobs"], atol=1e-4)
