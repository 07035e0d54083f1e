"""Search over layouts, recomputation and offload: the fastest that fits, and the fewest cards."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.config import BaseRunConfig
from aligner.config.commands.changes import TENSOR, overrides_of, single_changes
from aligner.config.commands.plan import trainer_keys, varied
from aligner.errors import ConfigError, DataError, LayoutError
from aligner_plan.estimate import Estimate, Estimator
from aligner_plan.layouts import Layout, batch_sizes, layouts, savings

Say = Callable[[str], None]
_GIB = 1 << 30
_NEAR = 1.05  # times within this factor count as equal: fewer changes are better
_WORTH = 0.7  # share of the least devices' tokens a second and device, below which more are not


@dataclass(frozen=True)
class Advice:
    """A change, and its effect."""

    changes: Mapping[str, Any]
    saved_bytes: float
    seconds: float  # of a step, more (or less) than before
    before: float
    fits: bool

    @property
    def words(self) -> str:
        """One line."""
        gib = self.saved_bytes / _GIB
        memory = f"saves {gib:.1f} GiB" if gib >= 0 else f"takes {-gib:.1f} GiB"
        time = f"{self.seconds / self.before:+.0%} time"
        return f"{' '.join(overrides_of(self.changes))}: {memory}, {time}" + (
            "" if self.fits else " (and does not fit)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {
            "overrides": overrides_of(self.changes),
            "saved_bytes": round(self.saved_bytes),
            "seconds": self.seconds,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Found:
    """The fastest of what was tried."""

    estimate: Estimate
    overrides: list[str]
    tried: int
    changed: int  # number of keys that have other values than before


@dataclass(frozen=True)
class Devices:
    """Number of devices that a run needs, and the number from which more do not help."""

    least: Estimate
    overrides: list[str]
    rows: list[dict[str, Any]]
    worth: int

    @property
    def words(self) -> str:
        """A few lines."""
        lines = [
            f"  {row['devices']:>5} devices: "
            + (
                f"{row['step_seconds']:.1f} s a step, {row['tokens_per_second']:.0f} tokens/s"
                if row["fits"]
                else "nothing fits"
            )
            for row in self.rows
        ]
        return "\n".join(
            [
                f"at least {self.least.cards} devices; up to {self.worth} are worth having (each "
                f"learns {_WORTH:.0%} or more of what one of the least number does)",
                *lines,
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {"least": self.least.cards, "worth": self.worth, "tried": self.rows}


def advice(estimator: Estimator, now: Estimate) -> list[Advice]:
    """Effects of single changes, the cheapest that helps first.

    If the run does not fit, those that make it; else those that save at least a twentieth of the
    peak, or time. Larger tensor-parallel groups are tried only if it does not fit, until one does.
    """
    found = []
    has_layout = now.fits
    for changes in single_changes(now.config):
        if has_layout and TENSOR in changes:
            continue
        try:
            other = estimator.estimate(varied(now.config, changes))
        except (ConfigError, LayoutError, DataError):
            continue
        has_layout |= other.fits and TENSOR in changes
        found.append(
            Advice(
                changes,
                now.peak_bytes - other.peak_bytes,
                other.step_seconds - now.step_seconds,
                now.step_seconds,
                other.fits,
            )
        )
    if now.fits:
        helping = [
            each
            for each in found
            if each.fits
            and (
                each.saved_bytes > 0.05 * now.peak_bytes or each.seconds < -0.02 * now.step_seconds
            )
        ]
    else:
        helping = [each for each in found if each.fits] or [
            each for each in found if each.saved_bytes > 0.02 * now.peak_bytes
        ]
    ordered = []
    while helping:
        options = [(each.before + each.seconds, len(each.changes)) for each in helping]
        ordered.append(helping.pop(_preferred(options)))
    return ordered


def _preferred(options: Sequence[tuple[float, int]]) -> int:
    """Index of the option with the fewest changes of those that are nearly as fast as the fastest.

    Each is the seconds of a step, and the number of changes.
    """
    limit = _NEAR * min(seconds for seconds, _ in options)
    near = [
        (changes, seconds, place)
        for place, (seconds, changes) in enumerate(options)
        if seconds <= limit
    ]
    return min(near)[-1]


def fastest(estimator: Estimator, config: BaseRunConfig, say: Say = lambda text: None) -> Found:
    """Try layouts of the run's devices, each with what makes it fit; the fastest that does.

    Of those that are within 5 % of it, the one that changes the fewest keys.

    Raises:
        ConfigError: nothing fits.
    """
    search = _Search(estimator, config, say)
    for layout in layouts(estimator, config):
        search.try_layout(layout)
    if not search.fitting:
        raise ConfigError(
            f"no layout of {config.trainer.world_size} x {estimator.device.name} holds this run; "
            + (
                f"the smallest peak of {search.tried} that were tried is "
                f"{search.closest / _GIB:.1f} GiB"
                if search.tried
                else "weights, gradients and optimizer are too much by themselves"
            )
            + "; take more devices (plan.devices=auto finds how many), larger ones, LoRA, or "
            "shorter responses"
        )
    options = [(each.estimate.step_seconds, each.changed) for each in search.fitting]
    return replace(search.fitting[_preferred(options)], tried=search.tried)


class _Search:
    """Variants that fit, and the number of those that were tried."""

    def __init__(self, estimator: Estimator, config: BaseRunConfig, say: Say) -> None:
        self.estimator, self.config, self.say = estimator, config, say
        self.fitting: list[Found] = []
        self.least_seconds = float("inf")  # of those that fit
        self.closest = float("inf")
        self.tried = 0

    def try_layout(self, layout: Layout) -> None:
        """Try memory-saving options until the layout fits; then smaller micro-batches while stages
        wait less for them.
        """
        if self._is_beaten(layout.least_seconds):
            return
        batches = batch_sizes(self.estimator, self.config, layout)
        quickest = len(batches) - 1 if layout.has_stages else 0
        for place, saving in savings(self.config, len(batches)):
            found = self._try({**layout.changes, **saving, **batches[place]})
            if found is None or not found.fits:
                # One that is no faster than the best before anything is saved never will be.
                if found is not None and place == quickest and self._is_beaten(found.step_seconds):
                    return
                continue
            for smaller in batches[place + 1 :] if layout.has_stages else []:
                another = self._try({**layout.changes, **saving, **smaller})
                if another is None or another.step_seconds >= found.step_seconds:
                    break
                found = another
            return

    def _is_beaten(self, seconds: float) -> bool:
        """True if a step that takes this long is not nearly as fast as the fastest."""
        return seconds > _NEAR * self.least_seconds

    def _try(self, changes: dict[str, Any]) -> Estimate | None:
        """Measure a variant; None: it cannot be, or cannot fit."""
        try:
            varied_config = varied(self.config, changes)
            least = self.estimator.least(varied_config)
            if least.card_bytes > self.estimator.usable_bytes:
                self.closest = min(self.closest, least.card_bytes)
                return None
            found = self.estimator.estimate(varied_config)
        except (ConfigError, LayoutError, DataError):
            return None
        self.tried += 1
        self.closest = min(self.closest, found.peak_bytes)
        words = overrides_of(changes)
        self.say(
            f"{'fits ' if found.fits else 'full '} {found.peak_bytes / _GIB:6.1f} GiB "
            f"{found.step_seconds:8.1f} s  {' '.join(words)}"
        )
        if found.fits:
            changed = sum(_value(varied_config, key) != _value(self.config, key) for key in changes)
            self.fitting.append(Found(found, words, self.tried, changed))
            self.least_seconds = min(self.least_seconds, found.step_seconds)
        return found


def _value(config: BaseRunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def fewest(estimator: Estimator, config: BaseRunConfig, say: Say = lambda text: None) -> Devices:
    """Search one, two, four … devices: the least that hold the run, and while more are worth it.

    Raises:
        ConfigError: nothing fits on the most that were tried.
    """
    rows: list[dict[str, Any]] = []
    least: Found | None = None
    worth, devices = 0, 1
    while devices <= 1024:
        say(f"{devices} x {estimator.device.name}")
        row: dict[str, Any] = {"devices": devices, "fits": False}
        try:
            found = fastest(estimator, varied(config, trainer_keys(devices)), say)
        except (ConfigError, LayoutError):
            if least is not None:
                break  # batches do not divide any further
            rows.append(row)
        else:
            per_second = found.estimate.tokens / found.estimate.step_seconds
            rows.append(row)
            row |= {
                "fits": True,
                "step_seconds": found.estimate.step_seconds,
                "tokens_per_second": per_second,
                "overrides": found.overrides,
            }
            if least is None:
                least, each = found, per_second / devices
            elif per_second / devices < _WORTH * each:
                break
            worth = devices
        devices *= 2
    if least is None:
        raise ConfigError(
            f"plan.devices=auto: nothing fits on up to 1024 x {estimator.device.name}; take larger "
            "devices, LoRA, or shorter responses"
        )
    trainer = overrides_of(trainer_keys(least.estimate.cards))
    return Devices(least.estimate, [*trainer, *least.overrides], rows, worth)
