"""Comparison of what two layouts saw."""

import torch

TOLERANCE = 1e-5


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
