"""A reward model learns the same in every layout, padded and packed: from pairs, from ratings."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from reward_training_worker import trained

WORKER = Path(__file__).with_name("reward_training_worker.py")
LAYOUTS = [
    *(
        f"{tensor},1,1,{packed},{loss}"
        for tensor in (1, 2)
        for packed in (0, 1)
        for loss in ("pairs", "ratings")
    ),
    *("1,2,1,0,pairs", "1,1,2,0,pairs"),
]


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    run_ranks(WORKER, 2, [tiny_nemo, folder / "two.pt", *LAYOUTS], timeout_s=250)
    one = {
        loss: trained(str(tiny_nemo), f"1,1,1,0,{loss}", folder / f"one_{loss}", saves=True)
        for loss in ("pairs", "ratings")
    }
    return one, torch.load(folder / "two.pt", weights_only=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, seen):
    loss = layout.split(",")[-1]
    one, two = seen[0][loss], seen[1][layout]
    assert one["rewards"].shape == ((12,) if loss == "pairs" else (12, 3))
    assert one["loss"][2] < one["loss"][0]  # it learned
    assert one["rewards"].std() > 0.1  # there was something to compare
    torch.testing.assert_close(two["loss"], one["loss"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(two["rewards"], one["rewards"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two["restored"], one["rewards"], atol=1e-5, rtol=1e-4)
