"""Layouts, recomputation and offload: which fit, which is fastest, and how many cards it takes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aligner.config import BaseRunConfig, RunConfig, SamplingRunConfig
from aligner.config.changes import RECOMPUTE, overrides_of, single_changes
from aligner.config.plan import PER_NODE, trainer_keys, varied
from aligner.errors import ConfigError, DataError, LayoutError
from aligner.observe.memory import RoleMemory
from aligner.plan.estimate import Estimate, Estimator

Say = Callable[[str], None]
_GIB = 1 << 30
_WORTH = 0.7  # share of the least devices' tokens a second and device, below which more are not


@dataclass(frozen=True)
class Advice:
    """A change, and what it does."""

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
        """For JSON."""
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


@dataclass(frozen=True)
class Devices:
    """How many devices a run needs, and how many are worth having."""

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
        """For JSON."""
        return {"least": self.least.cards, "worth": self.worth, "tried": self.rows}


def advice(estimator: Estimator, now: Estimate) -> list[Advice]:
    """What single changes do, the cheapest that helps first.

    Where the run does not fit, those that make it; else those that save at least a twentieth of
    the peak, or time.
    """
    found = []
    for changes in single_changes(now.config):
        try:
            other = estimator.estimate(varied(now.config, changes))
        except (ConfigError, LayoutError, DataError):
            continue
        found.append(
            Advice(
                changes,
                now.peak_bytes - other.peak_bytes,
                other.step_seconds - now.step_seconds,
                now.step_seconds,
                other.fits,
            )
        )
    if not now.fits:
        helping = [each for each in found if each.fits] or [
            each for each in found if each.saved_bytes > 0.02 * now.peak_bytes
        ]
        return sorted(helping, key=lambda each: each.seconds)
    helping = [
        each
        for each in found
        if each.fits
        and (each.saved_bytes > 0.05 * now.peak_bytes or each.seconds < -0.02 * now.step_seconds)
    ]
    return sorted(helping, key=lambda each: each.seconds)


def fastest(estimator: Estimator, config: BaseRunConfig, say: Say = lambda text: None) -> Found:
    """Try layouts of the run's devices, each with what makes it fit; the fastest that does.

    Raises:
        ConfigError: nothing fits.
    """
    best: Found | None = None
    closest = float("inf")
    tried = 0
    for layout in _layouts(config, estimator):
        for changes in _fitting(config):
            changes = {**layout, **changes}
            try:
                found = estimator.estimate(varied(config, changes))
            except (ConfigError, LayoutError, DataError):
                continue
            tried += 1
            closest = min(closest, found.peak_bytes)
            say(
                f"{'fits ' if found.fits else 'full '} {found.peak_bytes / _GIB:6.1f} GiB "
                f"{found.step_seconds:8.1f} s  {' '.join(overrides_of(changes))}"
            )
            if not found.fits:
                continue
            if best is None or found.step_seconds < best.estimate.step_seconds:
                best = Found(found, overrides_of(changes), tried)
            break  # what follows is slower
    if best is None:
        raise ConfigError(
            f"no layout of {config.trainer.world_size} x {estimator.device.name} holds this run; "
            + (
                f"the smallest peak of {tried} that were tried is {closest / _GIB:.1f} GiB"
                if tried
                else "weights, gradients and optimizer alone are too much"
            )
            + "; take more devices (plan.devices=auto says how many), larger ones, LoRA, or "
            "shorter responses"
        )
    return replace(best, tried=tried)


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


def _fitting(config: BaseRunConfig) -> Iterator[dict[str, Any]]:
    """Nothing, then what saves memory, in the order of what it costs."""
    offload: dict[str, Any] = {}
    if isinstance(config, SamplingRunConfig):
        offload[f"{config.model.rollout_key}.offload_adam_states"] = True
    if isinstance(config, RunConfig) and config.critic is not None:
        offload |= {"critic.offload_weights": True, "critic.offload_adam_states": True}
    yield {RECOMPUTE: None}
    yield {RECOMPUTE: "selective"}
    if offload:
        yield {RECOMPUTE: "selective", **offload}
    yield {RECOMPUTE: "full"}
    if offload:
        yield {RECOMPUTE: "full", **offload}
    if config.model.token_budgets is None:
        sizes: dict[str, Any] = {"model.micro_batch_size": 1}
        if isinstance(config, RunConfig) and config.critic is not None:
            sizes["critic.micro_batch_size"] = 1
        yield {RECOMPUTE: "full", **offload, **sizes}


def _layouts(config: BaseRunConfig, estimator: Estimator) -> Iterator[dict[str, Any]]:
    """Tensor and pipeline sizes that may hold weights, gradients and optimizer.

    Pipeline stages come where a node's tensor parallelism is not enough.
    """
    devices = config.trainer.world_size
    trained = 2 if isinstance(config, RunConfig) and config.critic is not None else 1
    parameters = estimator.parameters(config)
    for pipeline in (1, 2, 4, 8, 16):
        some = False
        for tensor in (1, 2, 4, 8):
            size = tensor * pipeline
            if tensor > PER_NODE or devices % size:
                continue
            role = RoleMemory(
                "",
                parameters,
                trainable=config.model.peft.lora is None,
                model_parallel_size=size,
                optimizer_shards=devices // size,
                weight_bytes=2 if config.trainer.precision == "bf16" else 4,
                optimizer_bytes=12 if config.trainer.precision == "bf16" else 8,
            )
            offloads = isinstance(config, SamplingRunConfig)
            if role.total * (1 if offloads else trained) > estimator.usable_bytes:
                continue
            some = True
            yield {
                "model.tensor_model_parallel_size": tensor,
                "model.pipeline_model_parallel_size": pipeline,
                "model.sequence_parallel": tensor > 1,
                "model.micro_batch_size": None,
                **({"critic.micro_batch_size": None} if trained == 2 else {}),
            }
        if some and pipeline > 1:
            return
