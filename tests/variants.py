"""Marks the variants of a test that only `make test-extended` runs."""

from collections.abc import Iterable

import pytest


def extended_except(every_time: Iterable, cases: Iterable) -> list:
    """Returns the parameters ``cases``, with the marker ``extended`` on all but ``every_time``."""
    every_time = list(every_time)
    return [
        pytest.param(case, marks=() if case in every_time else pytest.mark.extended)
        for case in cases
    ]
