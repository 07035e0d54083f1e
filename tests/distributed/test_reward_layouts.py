"""A reward model gives the rewards of one process in every layout, padded and packed."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from reward_worker import rewards

WORKER = Path(__file__).with_name("reward_worker.py")
LAYOUTS = {
    "data 2": "1,1,1,0",
    "tensor 2 + sequence": "2,1,1,0",
    "pipe 2": "1,2,1,0",
    "context 2": "1,1,2,0",
    "tensor 2 + sequence, packed": "2,1,1,1",
}


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    output = tmp_path_factory.mktemp("rewards") / "two.pt"
    run_ranks(WORKER, 2, [tiny_nemo, output, *LAYOUTS.values()], timeout_s=200)
    return rewards(str(tiny_nemo), "1,1,1,0"), torch.load(output, weights_only=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, seen):
    one, two = seen[0], seen[1][LAYOUTS[layout]]
    assert one.std() > 0.1  # there was something to compare
    assert (one - two).abs().max() / one.abs().max() < 1e-5
