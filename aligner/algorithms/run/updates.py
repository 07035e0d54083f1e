"""Metrics of the optimizer updates of one step, out of the results of the fronts' ``train``."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


def update_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics over all updates of a step: the mean, or for ``*_max`` and ``*_min`` the extreme.

    ``results``: one per pass over the rollout, in order. ``lr`` is that of the last update,
    ``skipped_updates`` and ``empty_updates`` are counts; an update that was skipped because it was
    not finite, and a mini-batch of which nothing counted, take no part in means.
    """
    series: dict[str, list[float]] = {}
    empty = 0.0
    for result in results:
        found = dict(result["all_mb_metrics"])
        flags = found.pop("empty", [])
        empty += sum(flags)
        for name, values in found.items():
            told = [value for value, flag in zip_longest(values, flags) if not flag]
            series.setdefault(name, []).extend(values if name == "lr" else told)
    skipped = series.pop("skipped", [])
    rates = series.pop("lr", [])
    norms = series.pop("grad_norm", [])
    metrics = {name: _combine(name, values) for name, values in series.items()}
    return {
        **metrics,
        "grad_norm": _combine("grad_norm", norms),
        "lr": rates[-1] if rates else 0.0,
        "skipped_updates": sum(skipped),
        "empty_updates": empty,
    }


def idle_roles(**passes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The roles that were to be updated and whose every update was skipped as not finite.

    ``passes``: for each role the results of a step.
    """
    skipped = {
        role: [one for result in results for one in result["all_mb_metrics"].get("skipped", [])]
        for role, results in passes.items()
    }
    return tuple(role for role, each in skipped.items() if each and all(each))


def count_updates(results: Sequence[Mapping[str, Any]]) -> int:
    """Optimizer updates that ``results`` stand for, skipped ones included, empty ones not."""
    passes = [result["all_mb_metrics"] for result in results]
    return sum(len(found.get("loss", [])) - int(sum(found.get("empty", []))) for found in passes)


def _combine(name: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    if name.endswith("_max"):
        return max(finite)
    if name.endswith("_min"):
        return min(finite)
    return sum(finite) / len(finite)
