"""Metrics and samples of a run, written as JSON lines and sent to TensorBoard and W&B.

Only metrics that ``metric_names.md`` lists, or whose names begin with a prefix listed there, can be
written. ``python -m aligner.observe.metrics`` prints all of them as one table of full names.
"""

import difflib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aligner.config.experiment import ExpManagerConfig
from aligner.errors import ConfigError, MissingPackageError
from aligner.observe.jsonl import JsonLines, read_lines
from aligner.observe.run_lock import RunLock
from aligner.packages import require_extra

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger

_log = logging.getLogger(__name__)


class MetricInfo(NamedTuple):
    """Meaning of a metric. ``over``: over what it is averaged, or how its values are combined."""

    meaning: str
    over: str = "one number"


def _read_tables(path: Path) -> tuple[dict[str, MetricInfo], dict[str, MetricInfo]]:
    """Read Markdown tables of metrics. Return (metrics by name, metrics by prefix of the name)."""
    groups: dict[str, dict[str, MetricInfo]] = {}
    prefixes: dict[str, MetricInfo] = {}
    section: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = re.findall(r"\w+", line.partition(":")[0])
        elif row := re.fullmatch(r"\| `(.+?)(\*?)` \| (.+) \| (.+) \|", line):
            name, star, meaning, over = row.groups()
            if star:
                prefixes[name] = MetricInfo(meaning, over)
                continue
            for group in section:
                groups.setdefault(group, {})[f"{group}/{name}"] = MetricInfo(meaning, over)
    return {name: info for group in groups.values() for name, info in group.items()}, prefixes


METRICS, PREFIXES = _read_tables(Path(__file__).with_name("metric_names.md"))


def describe(name: str) -> MetricInfo | None:
    """Return the meaning of the metric with the full name ``name``, or None if it is unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((info for prefix, info in PREFIXES.items() if name.startswith(prefix)), None)


def check_names(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a metric of ``names`` is not described in ``metric_names.md``."""
    for name in names:
        if describe(name) is None:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"metric {name!r} is not in aligner/observe/metric_names.md{hint} Add it to this "
                f"file, or use a name that begins with one of {', '.join(PREFIXES)}"
            )


class PhaseTimers:
    """Total seconds of named phases, which may repeat and may be nested.

    ``synchronize``: waits for the device. It is called at both ends of a phase, so that device work
    counts for the phase that started it. ``on_enter``: called with the name of a phase that begins.
    ``clock``: returns a monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] = lambda: None,
        on_enter: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._synchronize, self._on_enter, self._clock = synchronize, on_enter, clock
        self._seconds: dict[str, float] = {}
        self._start = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Context manager: add the duration of the block to ``phase``, also if it raises."""
        self._on_enter(phase)
        self._synchronize()
        start = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def flush(self) -> dict[str, float]:
        """Return and reset ``timers/<phase>`` and ``timers/total``, seconds since the last call."""
        now = self._clock()
        metrics = {f"timers/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["timers/total"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics


@dataclass(frozen=True)
class Sample:
    """A prompt with its response or conversation as text. Lengths are numbers of tokens."""

    step: int
    split: Literal["train", "val"]
    prompt: str
    response: str
    reward: float
    prompt_length: int
    response_length: int
    is_end: bool  # the model ended the response, not the length limit
    ground_truth: str | None = None
    sample_id: int | None = None
    turns: list[dict[str, Any]] | None = None  # of a conversation, each with its reward


class MetricsWriter:
    """Writer of ``metrics.jsonl`` and ``samples.jsonl`` in ``folder``, and of metrics to loggers.

    A line of ``metrics.jsonl`` contains ``step`` and the step's metrics by full name. A line of
    ``samples.jsonl`` contains a `Sample`. Write the lines of a step before its run state is saved,
    so that a resumed run finds them.

    Only rank 0 writes, and locks the folder against other runs. On other ranks all methods have no
    effect. ``loggers``: returns Lightning loggers, to which metrics are sent too. It is called at
    the first `write`, because importing the loggers takes seconds.
    """

    def __init__(
        self, folder: Path, *, rank: int = 0, loggers: Callable[[], "Sequence[Logger]"] = tuple
    ) -> None:
        self._lock = RunLock(folder) if rank == 0 else None
        names = ("metrics.jsonl", "samples.jsonl") if rank == 0 else ()
        self._files = [JsonLines(folder / name) for name in names]
        self._make_loggers = loggers
        self._loggers: Sequence[Logger] | None = None

    def write(self, step: int, metrics: Mapping[str, Any], samples: Sequence[Sample] = ()) -> None:
        """Append the lines of a new ``step``. ``metrics``: name → number or scalar tensor."""
        if not self._files:
            return
        check_names(metrics)
        scalars = {name: _scalar(name, metrics[name]) for name in sorted(metrics)}
        metric_lines, sample_lines = self._files
        if step == metric_lines.last_step:
            raise ValueError(f"{metric_lines.path} already contains step {step}, write it once")
        metric_lines.append([{"step": step, **scalars}])
        sample_lines.append(asdict(sample) for sample in samples)
        if self._loggers is None:
            self._loggers = self._make_loggers()
        for logger in self._loggers:
            logger.log_metrics({name: float(value) for name, value in scalars.items()}, step)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps than ``step`` (-1: all lines)."""
        for lines in self._files:
            lines.truncate_after(step)

    def close(self) -> None:
        """Finish the loggers, close the files and unlock the folder."""
        for logger in self._loggers or ():
            logger.finalize("success")
        for lines in self._files:
            lines.close()
        if self._lock is not None:
            self._lock.release()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``: ``step`` and metrics by name."""
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in line.items()}
        for line in read_lines(path)
    ]


def read_samples(path: Path) -> list[Sample]:
    """Return the lines of ``samples.jsonl``. Lines that are not a `Sample` are skipped."""
    samples = []
    for record in read_lines(path):
        with suppress(KeyError, TypeError, ValueError):
            samples.append(Sample(**{**record, "reward": float(record["reward"])}))
    return samples


def _scalar(name: str, value: Any) -> float | int:
    if hasattr(value, "dtype"):  # a tensor or a NumPy scalar
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(f"metric {name!r} is {value!r}, but a metric must be a number")
    return int(value) if isinstance(value, bool) else value


def make_loggers(
    folder: Path,
    exp: ExpManagerConfig,
    *,
    restored_step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> "list[Logger]":
    """Create the TensorBoard and W&B loggers that ``exp`` requests.

    They write to ``tensorboard/`` and ``wandb/`` in ``folder``. If the package tensorboard is
    missing, a warning replaces its logger. ``restored_step``: step at which the run is resumed.
    TensorBoard hides later points of the interrupted run. ``config``: configuration for W&B.
    """
    loggers: list[Logger] = []
    # TensorBoard is optional even if it is configured, because it is on by default.
    if exp.create_tensorboard_logger:
        try:
            require_extra("tensorboard", "writing metrics for TensorBoard")
        except MissingPackageError as error:
            _log.warning("%s", error)
        else:
            from lightning.fabric.loggers import TensorBoardLogger

            first_hidden = None if restored_step is None else restored_step + 1
            loggers.append(TensorBoardLogger(folder, "tensorboard", "", purge_step=first_hidden))
    # W&B is off by default. If it is on, the check before the run refuses a missing package.
    if exp.create_wandb_logger:
        from lightning.pytorch.loggers import WandbLogger

        # A resumed run reads the id from this file, so that W&B continues the same curves.
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        options = {
            "save_dir": folder,
            "id": id_file.read_text().strip(),
            "resume": "allow",
            "project": exp.wandb.project,
            "name": exp.wandb.name,
            **exp.wandb.kwargs,
        }
        wandb_logger = WandbLogger(**options)
        if config is not None:
            wandb_logger.log_hyperparams(dict(config))
        loggers.append(wandb_logger)
    return loggers


def markdown() -> str:
    """Return all metrics as a Markdown table."""
    lines = ["| metric | meaning | over |", "|---|---|---|"]
    entries = {**METRICS, **{f"{prefix}*": info for prefix, info in PREFIXES.items()}}
    lines += [f"| `{name}` | {info.meaning} | {info.over} |" for name, info in entries.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
