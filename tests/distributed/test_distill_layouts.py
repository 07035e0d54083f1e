"""Distillation gives one process's numbers on every layout, in whatever micro-batches.

Two updates and a validation, on the data's responses and on the student's own; the teacher is wider
than the student. Float32 rounding differs with the order of sums: weights agree to 1e-5 of the
largest of a tensor, reported numbers to 1e-4 of their value, or 1e-5 where that is more.
"""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from role_checks import assert_near_supervised

WORKER = Path(__file__).with_name("distill_worker.py")
# Tensor, context and pipeline parallelism over two processes; what is left is data parallel.
SIZES = ("2,1,1", "1,2,1", "1,1,1")
DEFAULT = [*(f"offline,{sizes},packed" for sizes in SIZES), "on_policy,2,1,1,packed"]
FURTHER = [
    *(f"offline,{sizes},{mode}" for sizes in SIZES for mode in ("padded", "dynamic")),
    *(f"offline,1,1,2,{mode}" for mode in ("padded", "packed")),
    *(f"on_policy,{sizes},padded" for sizes in SIZES),
]


def learned(processes, layouts, folder, model, teacher):
    output = folder / f"{processes}.pt"
    run_ranks(WORKER, processes, [model, teacher, output, *layouts], timeout_s=280)
    return torch.load(output, weights_only=True)


def check(one, other):
    assert one["steps"][1]["train_optim/loss"] < one["steps"][0]["train_optim/loss"]
    assert_near_supervised(one, other)


@pytest.mark.timeout(700)  # two starts of ranks, with 280 s each
@pytest.mark.parametrize(
    "layouts", [DEFAULT, pytest.param(FURTHER, marks=pytest.mark.extended)], ids=["few", "all"]
)
def test_a_layout_equals_one_process(layouts, tiny_nemo, teacher, tmp_path):
    kinds = sorted({layout.split(",")[0] for layout in layouts})
    one = learned(1, [f"{kind},1,1,1,padded" for kind in kinds], tmp_path, tiny_nemo, teacher)
    two = learned(2, layouts, tmp_path, tiny_nemo, teacher)
    for layout in layouts:
        check(one[f"{layout.split(',')[0]},1,1,1,padded"], two[layout])
