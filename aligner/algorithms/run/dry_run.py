"""Dry run: two steps of the real run on a batch of maximum length, to measure memory and time.

The tokens of the batch are random. Labels, ratings and columns are taken from the run's data. The
first step creates state that later steps reuse, such as the optimizer's moments. Memory peaks are
maxima of both steps, times are from the second step. The run's directory is not accessed.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from aligner.algorithms.run.engine import Clusters
from aligner.algorithms.run.loop import Learner
from aligner.architecture import GPTArchitecture
from aligner.catalog import ENGINES
from aligner.config import BaseRunConfig, RunConfig, SamplingRunConfig, SupervisedRunConfig
from aligner.config.commands.changes import overrides_of, single_changes
from aligner.config.commands.lengths import longest_lengths, samples_responses
from aligner.data.batches import Prompt
from aligner.data.dataset import Dataset
from aligner.data.preferences import Labelled, Pair, Rated
from aligner.data.supervised import Example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.accelerator import MemoryUse
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DeviceMemoryError, WorkerError, training_step
from aligner.models.handle import RoleHandle
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.collectives import gather_objects, this_rank
from aligner.rewards.function.runner import ScoredResponses
from aligner.rewards.model import ModelReward

Config = TypeVar("Config", bound=BaseRunConfig)
Kind = TypeVar("Kind", bound=Dataset[Any])
STEPS = 2
_GIB = 1 << 30
# Names of roles by prefixes of their workers, and of phases by methods of workers.
_ROLES = {"lm_policy": "policy", "lm_value": "critic", **dict.fromkeys(ENGINES, "policy")}
_PHASES = {
    "get_reference_policy_logprobs": "reference_logprobs",
    "get_topk_logits": "teacher",
    "prepare_for_training": "train",
    "prepare_for_generation": "generate",
    "start_generation": "generate",
}


@contextlib.contextmanager
def temporary_config(config: Config) -> Iterator[Config]:
    """Yield the `dry_config` of ``config``, with a temporary directory for the run's files."""
    folder = Path(tempfile.mkdtemp(prefix="aligner-dry-run-"))
    keeps_logs = False
    try:
        with explain_out_of_memory(config, lambda: "setting up"):
            yield dry_config(config, folder)
    except (WorkerError, DeviceMemoryError):
        keeps_logs = (folder / "workers").exists()  # the message contains the path of a log
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(folder, ignore_errors=True)


def dry_config(config: Config, folder: Path) -> Config:
    """Return ``config`` changed to `STEPS` steps, with responses of maximum length."""
    # Few steps, all of which train all models.
    loop_name = config.section.partition(".")[2]
    loop = replace(getattr(config.trainer, loop_name), max_epochs=STEPS, max_steps=STEPS)
    if isinstance(config, RunConfig):  # with "keep", responses that do not end are trained on
        improper_end = replace(loop.improper_end, mode="keep")
        loop = replace(loop, critic_warmup_steps=0, improper_end=improper_end)
    # Responses of maximum length.
    model = config.model
    if samples_responses(config):
        name = model.rollout_key.partition(".")[2]
        section = getattr(model, name)
        lengths = replace(section.length_params, min_length=section.length_params.max_length)
        model = replace(model, **{name: replace(section, length_params=lengths)})
    loggers: dict[str, Any] = {"create_tensorboard_logger": False, "create_wandb_logger": False}
    return replace(
        config,
        model=model,
        exp_manager=replace(config.exp_manager, explicit_log_dir=str(folder), **loggers),
        cluster=replace(config.cluster, max_restarts=0),
        trainer=replace(config.trainer, **{loop_name: loop}),
    )


@contextlib.contextmanager
def explain_out_of_memory(config: BaseRunConfig, phase: Callable[[], str]) -> Iterator[None]:
    """Convert out-of-memory errors to `DeviceMemoryError`, which names ``phase()`` and remedies."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DeviceMemoryError) or not accelerator.is_out_of_memory(error):
            raise
        changes = [" ".join(overrides_of(change)) for change in single_changes(config, saving=True)]
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DeviceMemoryError(
            f"out of memory in {phase()}, on rank {this_rank()} ({accelerator.description()}): "
            f"{lines[0]}\nEach of these changes saves memory: "
            f"{', '.join(changes) or 'a smaller batch or model'}, more devices, LoRA "
            "(model.peft.peft_scheme=lora), shorter sequences. `aligner plan` estimates the memory"
        ) from error


def longest_set(
    config: BaseRunConfig, data: Kind, tokenizer: Tokenizer, *readers: GPTArchitecture
) -> Kind:
    """Return items of ``data`` for one step, with random tokens up to the maximum length.

    ``readers``: architectures of all models that get the sequences. They limit lengths and ids.
    """
    positions = min(reader.max_position_embeddings for reader in readers)
    vocab_size = min(tokenizer.vocab_size, *(reader.vocab_size for reader in readers))
    prompt, length = longest_lengths(config, positions, read=data.max_length)
    generator = torch.Generator().manual_seed(config.seed)

    def random_ids() -> list[int]:
        return torch.randint(vocab_size, (prompt or length,), generator=generator).tolist()

    if isinstance(config, SamplingRunConfig):
        rollout = config.model.rollout
        count = rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
    else:
        assert isinstance(config, SupervisedRunConfig), type(config)
        count = config.model.global_batch_size // config.rows_per_example
    order = range(len(data))
    if data.mixture is not None:
        order = data.mixture.order(config.seed, 0, shuffle=False).tolist()
    items = [_lengthened(data[order[index % len(order)]], random_ids) for index in range(count)]
    return type(data)(items, dropped_too_long=data.dropped_too_long, recognised=data.recognised)


def _lengthened(item: Any, random_ids: Callable[[], list[int]]) -> Any:
    """Return ``item`` with random sequences, in which all tokens but the first are learned."""
    match item:
        case Prompt():
            return replace(item, text="", ids=random_ids())
        case Example():
            ids = random_ids()
            return replace(item, ids=ids, learned=[(1, len(ids))])
        case Rated() | Pair() | Labelled():
            examples = [_lengthened(example, random_ids) for example in item.examples]
            return item.with_examples(examples)
    raise TypeError(f"not an item of a data set: {item!r:.80}")


class MadeUpRewards:
    """Alternating rewards 0 and 1. A reward ``model``, if any, also scores random sequences."""

    def __init__(self, model: ModelReward | None, seed: int) -> None:
        self.model, self._seed = model, seed

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Return rewards 0, 1, 0, 1, ..., and empty texts. Reads ``input_lengths`` int64 [B]."""
        if self.model is not None:
            encoder, role = self.model.encoder, self.model.model
            generator = torch.Generator().manual_seed(self._seed)
            size, lengths = encoder.tokenizer.vocab_size, data["input_lengths"]
            sequences = [
                torch.randint(size, (length,), generator=generator).tolist()
                for length in lengths.clamp(max=encoder.max_length).tolist()
            ]
            role.prepare_for_inference()
            role.get_rewards(encoder.collate(sequences), self.model.micro_batch_size)
            role.finish_inference()
        rewards = (torch.arange(data.size) % 2).float()
        return ScoredResponses([""] * data.size, rewards, {})


def role_named(prefix: str) -> str:
    """Return the name of the model whose workers have the name prefix ``prefix``."""
    return _ROLES.get(prefix, prefix.replace("_", " "))


def phase_named(method: str) -> str:
    """Return the name of the phase in which the worker method ``method`` is called."""
    return _PHASES.get(method, method.removeprefix("get_"))


class Calls:
    """Record of the last worker call in each timed phase."""

    def __init__(self) -> None:
        self.phase = ""  # timed phase in progress
        self.names: dict[str, tuple[str, str]] = {}  # names of model and phase, by timed phase

    def watch(self, clusters: Clusters) -> Clusters:
        """Return ``clusters`` with worker groups that record their calls in this object."""
        return Clusters(*(_Watched(cluster, self) for cluster in vars(clusters).values()))


class _Watched:
    """A cluster or worker group that records each call of workers in ``calls``."""

    def __init__(self, target: Any, calls: Calls, role: str = "") -> None:
        self._target, self._calls, self._role = target, calls, role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> Any:
        group = self._target.start_workers(worker_class, name_prefix, **kwargs)
        return _Watched(group, self._calls, role_named(name_prefix))

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> Any:
        if method_name in _PHASES:
            self._calls.names[self._calls.phase] = self._role, phase_named(method_name)
        return self._target.run_all_workers_single_data(method_name, **kwargs)

    def run_all_workers_sharded_data(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        self._calls.names[self._calls.phase] = self._role, phase_named(method_name)
        return self._target.run_all_workers_sharded_data(method_name, *args, **kwargs)


@dataclass(frozen=True)
class DevicePeak:
    """Peak memory of a phase in bytes, on its fullest device: a GPU, or a machine without GPUs."""

    has_gpu: bool
    allocated: int  # for tensors, by all processes of the run
    reserved: int  # by all processes of the run
    uncounted: int  # on a GPU: contexts, NCCL, other programs
    total: int
    rank: int  # rank of the process that reserved most
    largest: int  # bytes that this process reserved

    @property
    def used(self) -> int:
        """Memory in use by all programs."""
        return self.reserved + self.uncounted

    @property
    def share(self) -> float:
        """Fraction of the device's memory in use."""
        return self.used / self.total


def fullest(uses: Sequence[tuple[int, MemoryUse]]) -> DevicePeak:
    """Return the peak of the fullest device. ``uses``: rank and memory of each process."""
    devices: dict[str, dict[str, tuple[int, MemoryUse]]] = {}
    for rank, use in uses:
        devices.setdefault(use.device, {})[use.process] = (rank, use)
    peaks = []
    for processes in devices.values():
        rank, largest = max(processes.values(), key=lambda process: process[1].reserved)
        memory_uses, uncounted = [use for _, use in processes.values()], 0
        if largest.has_gpu:
            free = min(use.free for use in memory_uses)
            uncounted = max(0, largest.total - free - sum(use.current for use in memory_uses))
        allocated = sum(use.allocated for use in memory_uses)
        reserved = sum(use.reserved for use in memory_uses)
        sizes = (allocated, reserved, uncounted, largest.total)
        peaks.append(DevicePeak(largest.has_gpu, *sizes, rank, largest.reserved))
    return max(peaks, key=lambda peak: peak.share)


class MeasuredPhases(PhaseTimers):
    """Timers that also measure the peak memory of each phase, over all ranks."""

    def __init__(self, handles: Sequence[RoleHandle], calls: Calls) -> None:
        super().__init__(synchronize=accelerator.synchronize)
        self._handles, self._calls = handles, calls
        self.current = "between phases"
        self.peaks: dict[str, DevicePeak] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure time and memory of the ``with`` block, unless it raises."""
        for handle in self._handles:
            handle.reset_peak_memory()
        self.current = self._calls.phase = phase
        with super().__call__(phase):
            yield
        self.current = f"the work after {phase}"
        # With Ray, a handle measures all workers. Otherwise it measures the worker of this process.
        local = [
            (this_rank() if len(workers) == 1 else index, use)
            for workers in [handle.memory_use() for handle in self._handles]
            for index, use in enumerate(workers)
        ]
        peak = fullest([use for uses in gather_objects(local) for use in uses])
        earlier = self.peaks.get(phase)
        if earlier is None or peak.used > earlier.used:
            self.peaks[phase] = peak


@dataclass(frozen=True)
class DryLoop:
    """Loop of a dry run: `STEPS` training steps, without files."""

    config: BaseRunConfig
    learner: Learner
    roles: Sequence[RoleHandle]
    calls: Calls
    console: Console

    def run(self) -> None:
        """Execute the steps, and print memory and time of each phase."""
        phases, names = MeasuredPhases(self.roles, self.calls), self.calls.names
        names.clear()  # remove calls of the set-up
        seconds: Mapping[str, float] = {}
        idle: tuple[str, ...] = ()
        with explain_out_of_memory(
            self.config, lambda: ", ".join(names.get(phases.current, ("run", phases.current)))
        ):
            for step in range(1, STEPS + 1):
                self.console.print(f"dry run: step {step} of {STEPS}", highlight=False)
                phases.flush()
                with training_step(step):
                    idle += self.learner.step(step, phases).idle_roles
                seconds = phases.flush()
        self.console.print(report(names, phases.peaks, seconds, idle, accelerator.description()))


def report(
    names: Mapping[str, tuple[str, str]],
    peaks: Mapping[str, DevicePeak],
    seconds: Mapping[str, float],
    idle: Sequence[str],
    device: str,
) -> Group:
    """Return a table of memory and time of each phase, and a summary.

    ``names``: model and phase, by timed phase. ``idle``: models whose updates were skipped.
    """
    measured = {phase: peaks[phase] for phase in names if phase in peaks}
    has_gpu = any(peak.has_gpu for peak in measured.values())
    # Columns: parts of a GPU's memory, or without GPUs the resident memory of the largest process.
    if has_gpu:
        memory, place = ["allocated", "reserved", "beside", "of card"], device
        legend = "allocated: tensors. reserved: PyTorch's memory for tensors. beside: contexts, "
        legend += "NCCL and other programs. of card: sum of reserved and beside"
    else:
        memory, place = ["resident", "of memory"], "the machine"
        legend = "resident: the largest process, including libraries and memory that earlier "
        legend += "phases have freed. of memory: all processes of the machine"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    for column in ("role", "phase", *memory, "rank", "s"):
        table.add_column(column, justify="left" if column in ("role", "phase") else "right")
    # A row for every phase.
    for phase, peak in measured.items():
        sizes = [peak.allocated, peak.reserved, peak.uncounted] if has_gpu else [peak.largest]
        table.add_row(
            *names[phase],
            *(f"{size / _GIB:.2f}" for size in sizes),
            f"{peak.share:.0%}",
            str(peak.rank),
            f"{seconds.get(f'timers/{phase}', 0.0):.2f}",
        )
    # The summary: meaning of the columns, the phase with the highest peak, and time of a step.
    fullest_phase = max(measured, key=lambda phase: measured[phase].used)
    peak, name = measured[fullest_phase], ", ".join(names[fullest_phase])
    lines = [
        f"peaks on the fullest device, in GiB. {legend}",
        f"fullest in {name}: {peak.used / _GIB:.2f} of {peak.total / _GIB:.2f} GiB of {place}",
        f"a step on this batch takes {seconds.get('timers/total', 0.0):.2f} s. Nothing was saved",
    ]
    # Without an update, the optimizer has no state, so the measured memory is too low.
    warnings = [
        f"updates of the {role} were skipped because of NaN or infinity: peaks lack its optimizer"
        for role in dict.fromkeys(idle)
    ]
    return Group(table, *map(Text, lines), *(Text(line, "bold red") for line in warnings))
