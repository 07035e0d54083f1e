"""A published loss gives the numbers of the same loss of this library, in every layout.

Loss and gradient norm of two updates, on two ranks, of logits that all ranks have whole.
"""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("loss_rank.py")

pytestmark = pytest.mark.extended


def test_every_layout_learns_the_same(tiny_nemo, tmp_path):
    out = tmp_path / "seen.pt"
    run_ranks(WORKER, 2, [tiny_nemo, out], timeout_s=280)
    seen = torch.load(out, weights_only=True)
    expected = seen["megatron", "dp", "NegativeLogLikelihoodLoss"]
    assert expected[1][0] < expected[0][0]
    assert len(seen) == 18
    for case, results in seen.items():
        for ours, theirs in zip(expected, results, strict=True):
            assert theirs == pytest.approx(ours, rel=2e-4), case
