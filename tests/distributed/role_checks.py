"""What `role_worker` saw of two layouts, compared."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from aligner.checkpoint.nemo.model_file import open_nemo

WORKER = Path(__file__).with_name("role_worker.py")


def launch(processes, model, output, layouts):
    """Run the worker on so many processes; what it saw, by layout."""
    run_ranks(WORKER, processes, [model, output, *layouts], timeout_s=480)
    return torch.load(output, weights_only=True)


def assert_same(one, many, files, tolerance=1e-5):
    """Answers, reports, responses and the written weights of one role, relative to the largest."""
    for key in ("before", "after"):
        scale = one[key].abs().max().clamp(min=1e-3)  # a fresh critic says 0 everywhere
        assert (one[key] - many[key]).abs().max() / scale < tolerance, key
    assert (one["after"] - one["before"]).abs().max() > 1e-3  # there was something to compare
    for single, spread in zip(one["updates"], many["updates"], strict=True):
        assert single.keys() == spread.keys()
        assert single["grad_norm"] > 0.1  # clipped, so that a wrong norm would move the weights
        for key, value in single.items():
            assert spread[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for single, spread in zip(one["generated"], many["generated"], strict=True):
        assert torch.equal(single, spread)
    with open_nemo(files[0]) as single, open_nemo(files[1]) as spread:
        assert list(single.weights) == list(spread.weights)
        for key, tensor in single.weights.items():
            difference = (tensor - spread.weights[key]).abs().max()
            assert difference / tensor.abs().max().clamp(min=1e-3) < tolerance, key
