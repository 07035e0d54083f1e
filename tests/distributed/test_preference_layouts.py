"""Preference optimisation gives one process's numbers on every layout, in whatever micro-batches.

Two updates of DPO (pairs) and KTO (single rows and a baseline of the whole batch), with what the
reference says asked on that layout. Float32 rounding differs with the order of sums: weights agree
to 1e-5 of the largest of a tensor, reported numbers to 1e-4 of their value, or 1e-5 where that is
more. Responses have one to four tokens, so that the rows of a pair differ in length.
"""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from role_checks import assert_near_supervised

WORKER = Path(__file__).with_name("preference_worker.py")
MODES = ("padded", "packed")
LOSSES = ("dpo", "kto")
# Tensor parallelism over two processes; what is left is data parallel.
SPREAD = [*(f"{tensor},{mode}" for tensor in (1, 2) for mode in MODES), "1,dynamic"]
LAYOUTS = {1: ["1,padded"], 2: SPREAD}


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")

    def launch(processes):
        layouts = [f"{loss},{layout}" for loss in LOSSES for layout in LAYOUTS[processes]]
        output = folder / f"{processes}.pt"
        run_ranks(WORKER, processes, [tiny_nemo, output, *layouts], timeout_s=280)
        return torch.load(output, weights_only=True)

    return {processes: launch(processes) for processes in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_layout_equals_one_process(loss, layout, seen):
    one, other = seen[1][f"{loss},1,padded"], seen[2][f"{loss},{layout}"]
    assert one["steps"][1]["train_optim/rewards_margin"] != 0  # there was something to compare
    assert_near_supervised(one, other)
