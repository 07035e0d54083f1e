"""Search over layouts, recomputation and offload: the fastest that fits, and the fewest cards."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.config import BaseRunConfig
from aligner.config.commands.changes import TENSOR, overrides_of, single_changes
from aligner.errors import ConfigError, DataError, LayoutError
from aligner_plan.estimate import Estimate, Estimator
from aligner_plan.layouts import Layout, batch_sizes, layouts, savings
from aligner_plan.options import trainer_keys, varied

Log = Callable[[str], None]
_GIB = 1 << 30
_NEAR = 1.05  # times within this factor count as equal, so that fewer changes win
_WORTH = 0.7  # least throughput per device of a larger run, relative to the smallest run
_MOST_DEVICES = 1024
_SCARCE = 0.5  # share of a card's memory, from which on advice also saves memory


@dataclass(frozen=True)
class Advice:
    """A change and its effect."""

    changes: Mapping[str, Any]
    saved_bytes: float
    seconds: float  # difference of the step's time
    baseline: float  # the step's seconds without the change
    fits: bool

    @property
    def words(self) -> str:
        """Description in one line."""
        gib = self.saved_bytes / _GIB
        memory = f"saves {gib:.1f} GiB" if gib >= 0 else f"takes {-gib:.1f} GiB"
        time = f"{self.seconds / self.baseline:+.0%} time"
        return f"{' '.join(overrides_of(self.changes))}: {memory}, {time}" + (
            "" if self.fits else " (and does not fit)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "overrides": overrides_of(self.changes),
            "saved_bytes": round(self.saved_bytes),
            "seconds": self.seconds,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class SearchResult:
    """The fastest candidate of a search."""

    estimate: Estimate
    overrides: list[str]
    tried: int
    changed: int  # number of keys whose values differ from the configuration


@dataclass(frozen=True)
class Devices:
    """The least number of devices that a run needs, and the number from which more do not help."""

    least: Estimate
    overrides: list[str]
    rows: list[dict[str, Any]]
    worth: int

    @property
    def words(self) -> str:
        """Description in a few lines."""
        lines = [
            f"at least {self.least.cards} devices; up to {self.worth} are worth having (each "
            f"learns {_WORTH:.0%} or more of what one of the least number does)"
        ]
        for row in self.rows:
            result = "nothing fits"
            if row["fits"]:
                result = f"{row['step_seconds']:.1f} s a step, "
                result += f"{row['tokens_per_second']:.0f} tokens/s"
            lines.append(f"  {row['devices']:>5} devices: {result}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"least": self.least.cards, "worth": self.worth, "tried": self.rows}


def advice(estimator: Estimator, baseline: Estimate) -> list[Advice]:
    """Measure single changes and return the helpful ones, the fastest first.

    If the run does not fit, these are the changes that make it fit, or else the changes that save
    memory. If it fits, these are the changes that save a twentieth of the peak, or time. If the
    run needs less than half of the usable memory, only changes that may save time are tried.
    Larger tensor-parallel groups are only tried for a run that does not fit, until one fits.
    """
    candidates = list(single_changes(baseline.config))
    if baseline.peak_bytes < _SCARCE * estimator.usable_bytes:
        saving = list(single_changes(baseline.config, saving=True))
        candidates = [changes for changes in candidates if changes not in saving]
    results = []
    has_layout = baseline.fits
    for changes in candidates:
        if has_layout and TENSOR in changes:
            continue
        try:
            changed = estimator.estimate(varied(baseline.config, changes))
        except (ConfigError, LayoutError, DataError):
            continue
        has_layout |= changed.fits and TENSOR in changes
        saved_bytes = baseline.peak_bytes - changed.peak_bytes
        seconds = changed.step_seconds - baseline.step_seconds
        results.append(Advice(changes, saved_bytes, seconds, baseline.step_seconds, changed.fits))
    helpful = [result for result in results if result.fits]
    if baseline.fits:
        memory, time = 0.05 * baseline.peak_bytes, 0.02 * baseline.step_seconds
        helpful = [r for r in helpful if r.saved_bytes > memory or r.seconds < -time]
    elif not helpful:
        memory = 0.02 * baseline.peak_bytes
        helpful = [result for result in results if result.saved_bytes > memory]
    ordered = []
    while helpful:
        options = [(result.baseline + result.seconds, len(result.changes)) for result in helpful]
        ordered.append(helpful.pop(_preferred(options)))
    return ordered


def _preferred(options: Sequence[tuple[float, int]]) -> int:
    """Return the index of the nearly fastest option (seconds, changes) with the fewest changes."""
    limit = _NEAR * min(seconds for seconds, _ in options)
    near = [index for index, (seconds, _) in enumerate(options) if seconds <= limit]
    return min(near, key=lambda index: options[index][::-1])


def fastest(
    estimator: Estimator, config: BaseRunConfig, log: Log = lambda text: None
) -> SearchResult:
    """Try the layouts of the run's devices, with options that make each fit. Return the fastest.

    Among candidates within 5 % of the fastest, the one with the fewest changed keys is returned.

    Raises:
        ConfigError: nothing fits.
    """
    search = _Search(estimator, config, log)
    for layout in layouts(estimator, config):
        search.try_layout(layout)
    if not search.fitting:
        reason = "weights, gradients and optimizer alone are too large"
        if search.tried:
            gib = search.least_bytes / _GIB
            reason = f"the smallest peak of {search.tried} candidates is {gib:.1f} GiB"
        raise ConfigError(
            f"no layout of {config.trainer.world_size} x {estimator.device.name} fits this run: "
            f"{reason}. Use more devices (plan.devices=auto finds the number), larger ones, LoRA, "
            "or shorter responses"
        )
    options = [(result.estimate.step_seconds, result.changed) for result in search.fitting]
    return replace(search.fitting[_preferred(options)], tried=search.tried)


class _Search:
    """Candidates that fit, and the number of candidates that were tried."""

    def __init__(self, estimator: Estimator, config: BaseRunConfig, log: Log) -> None:
        self.estimator, self.config, self.log = estimator, config, log
        self.fitting: list[SearchResult] = []
        self.least_seconds = float("inf")  # of the candidates that fit
        self.least_bytes = float("inf")
        self.tried = 0

    def try_layout(self, layout: Layout) -> None:
        """Try memory-saving options until the layout fits.

        With pipeline stages, then try smaller micro-batches while these shorten the idle time.
        """
        if self._is_slow(layout.least_seconds):
            return
        batches = batch_sizes(self.estimator, self.config, layout)
        quickest = len(batches) - 1 if layout.has_stages else 0
        for index, saving in savings(self.config, len(batches)):
            estimate = self._try({**layout.changes, **saving, **batches[index]})
            if estimate is None or not estimate.fits:
                # Saving memory never makes a candidate faster, so a slow layout is given up.
                seconds = 0.0 if estimate is None else estimate.step_seconds
                if index == quickest and self._is_slow(seconds):
                    return
                continue
            for smaller in batches[index + 1 :] if layout.has_stages else []:
                shorter = self._try({**layout.changes, **saving, **smaller})
                if shorter is None or shorter.step_seconds >= estimate.step_seconds:
                    break
                estimate = shorter
            return

    def _is_slow(self, seconds: float) -> bool:
        """Return whether a step of this time is not nearly as fast as the fastest."""
        return seconds > _NEAR * self.least_seconds

    def _try(self, changes: dict[str, Any]) -> Estimate | None:
        """Estimate a candidate. Return None if it is invalid or certain not to fit."""
        try:
            config = varied(self.config, changes)
            bounds = self.estimator.lower_bounds(config)
            if bounds.card_bytes > self.estimator.usable_bytes:
                self.least_bytes = min(self.least_bytes, bounds.card_bytes)
                return None
            estimate = self.estimator.estimate(config)
        except (ConfigError, LayoutError, DataError):
            return None
        self.tried += 1
        self.least_bytes = min(self.least_bytes, estimate.peak_bytes)
        overrides = overrides_of(changes)
        self.log(
            f"{'fits ' if estimate.fits else 'full '} {estimate.peak_bytes / _GIB:6.1f} GiB "
            f"{estimate.step_seconds:8.1f} s  {' '.join(overrides)}"
        )
        if estimate.fits:
            changed = sum(_value(config, key) != _value(self.config, key) for key in changes)
            self.fitting.append(SearchResult(estimate, overrides, self.tried, changed))
            self.least_seconds = min(self.least_seconds, estimate.step_seconds)
        return estimate


def _value(config: BaseRunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def fewest(estimator: Estimator, config: BaseRunConfig, log: Log = lambda text: None) -> Devices:
    """Search on 1, 2, 4 … devices for the least number that fits, and the most worth having.

    Raises:
        ConfigError: nothing fits on any number of devices.
    """
    rows: list[dict[str, Any]] = []
    least: SearchResult | None = None
    least_rate = 0.0  # tokens per second and device of the smallest run
    worth, devices = 0, 1
    while devices <= _MOST_DEVICES:
        log(f"{devices} x {estimator.device.name}")
        # The fastest variant on this number of devices.
        row: dict[str, Any] = {"devices": devices, "fits": False}
        try:
            result = fastest(estimator, varied(config, trainer_keys(devices)), log)
        except (ConfigError, LayoutError):
            if least is not None:
                break  # batches cannot be divided more
            rows.append(row)
        else:
            rate = result.estimate.tokens / result.estimate.step_seconds
            rows.append(row)
            row |= {
                "fits": True,
                "step_seconds": result.estimate.step_seconds,
                "tokens_per_second": rate,
                "overrides": result.overrides,
            }
            if least is None:
                least, least_rate = result, rate / devices
            elif rate / devices < _WORTH * least_rate:
                break
            worth = devices
        devices *= 2
    if least is None:
        raise ConfigError(
            f"plan.devices=auto: nothing fits on up to {_MOST_DEVICES} x {estimator.device.name}. "
            "Use larger devices, LoRA, or shorter responses"
        )
    trainer = overrides_of(trainer_keys(least.estimate.cards))
    return Devices(least.estimate, [*trainer, *least.overrides], rows, worth)
