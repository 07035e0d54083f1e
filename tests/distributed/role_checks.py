"""What `role_worker` saw of two layouts, compared."""

import dataclasses
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from role_worker import train_both

from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

TOLERANCE = 1e-5
SMALL = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2
)
WORKER = Path(__file__).with_name("role_worker.py")


def write_random(path, architecture):
    """A `.nemo` with random weights, large enough that layouts could differ."""
    weights = random_weights(architecture, scale=0.2)
    save_nemo(path, weights, architecture, byte_level_tokenizer().files())
    return path


def one_and_two(folder, architecture, one, layouts):
    """A random model's file, what one process saw in layout ``one``, and two in ``layouts``."""
    model = write_random(folder / "model.nemo", architecture)
    alone = train_both(str(model), f"{model}.1", one)
    return model, alone, launch(2, model, f"{model}.2", layouts)


def launch(processes, model, output, layouts):
    """Run the worker on so many processes; what it saw, by layout."""
    run_ranks(WORKER, processes, [model, output, *layouts], timeout_s=480)
    return torch.load(output, weights_only=True)


def difference(expected, actual, smallest=1e-6):
    """The largest difference, relative to the largest value."""
    return ((expected - actual).abs().max() / expected.abs().max().clamp(min=smallest)).item()


def assert_near(expected, actual, where="", smallest=1e-6):
    """Compare tensors relative to their largest value, numbers to theirs or to 1e-2.

    A number may be a mean of terms up to 1, which cancel. ``smallest``: the least value to which
    differences are relative.
    """
    if isinstance(expected, torch.Tensor):
        assert difference(expected, actual, smallest) < TOLERANCE, where
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for name, value in expected.items():
            assert_near(value, actual[name], f"{where} {name}", smallest)
    else:
        assert abs(expected - actual) < TOLERANCE * max(abs(expected), 1e-2), where


def assert_near_supervised(one, other):
    """Reports of two updates and a validation, and the weights after them."""
    for expected, actual in zip(one["steps"], other["steps"], strict=True):
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert_near(one["weights"], other["weights"])


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
