"""A dry run: two steps of the real run on the longest batch, to see what they take.

    configuration ─► the same set-up ─► longest batch, random tokens ─► step 1, step 2 ─► peaks

Everything else about the items of that batch (labels, ratings, columns) is that of the run's data.

The first step makes what later ones find (an optimizer's moments, CUDA graphs, workspaces); peaks
are those of both, seconds those of the second. Nothing of the run's directory is read or written.
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

from aligner.algorithms.run.calls import Calls
from aligner.algorithms.run.loop import Learner
from aligner.architecture import GPTArchitecture
from aligner.config import BaseRunConfig, RunConfig, SamplingRunConfig, SupervisedRunConfig
from aligner.config.commands.changes import overrides_of, single_changes
from aligner.config.commands.lengths import longest_lengths, samples_responses
from aligner.data.dataset import Dataset
from aligner.data.labelled import Labelled
from aligner.data.preferences import Pair
from aligner.data.prompts import Prompt
from aligner.data.ratings import Rated
from aligner.data.supervised import Example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.accelerator import MemoryUse
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.step import training_step
from aligner.errors import DeviceMemoryError, WorkerError
from aligner.models.handle import RoleHandle
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.collectives import gather_objects, this_rank
from aligner.rewards.interface import ScoredResponses
from aligner.rewards.model import ModelReward

Config = TypeVar("Config", bound=BaseRunConfig)
Kind = TypeVar("Kind", bound=Dataset[Any])
STEPS = 2
_GIB = 1 << 30
_OF_A_CARD = (
    "GiB of the card: what tensors took, what torch took for them, and beside it contexts, NCCL "
    "and other programs"
)
_OF_A_PROCESS = (
    "GiB resident in the fullest process, libraries included; what one phase frees is kept for "
    "the next. The share is that of all processes of the machine"
)


# Before the run --------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere(config: Config) -> Iterator[Config]:
    """``config`` as a dry run has it (`dry_config`), which writes nothing for long.

    Logs of workers on Ray stay where one of them failed.

    Raises:
        DeviceMemoryError: the run took more memory than there is; where, and what saves some.
    """
    folder = Path(tempfile.mkdtemp(prefix="aligner-dry-run-"))
    try:
        with explained(config, lambda: "setting up"):
            yield dry_config(config, folder)
    except (WorkerError, DeviceMemoryError):
        if not (folder / "workers").exists():
            shutil.rmtree(folder)
        raise  # else the message names a log in the folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def dry_config(config: Config, folder: Path) -> Config:
    """``config`` as a dry run has it: `STEPS` steps that train every role, responses that do not
    end before ``max_length``, no loggers, and ``folder`` for what is written on the way.
    """
    exp = replace(
        config.exp_manager,
        explicit_log_dir=str(folder),
        create_tensorboard_logger=False,
        create_wandb_logger=False,
    )
    loop_name = config.section.partition(".")[2]
    loop = replace(getattr(config.trainer, loop_name), max_epochs=STEPS, max_steps=STEPS)
    if isinstance(config, RunConfig):  # else nobody would learn from responses that do not end
        improper_end = replace(loop.improper_end, mode="keep")
        loop = replace(loop, critic_warmup_steps=0, improper_end=improper_end)
    model = config.model
    if samples_responses(config):
        name = model.rollout_key.partition(".")[2]
        section = getattr(model, name)
        lengths = section.length_params
        whole = replace(lengths, min_length=lengths.max_length)
        model = replace(model, **{name: replace(section, length_params=whole)})
    return replace(
        config,
        model=model,
        exp_manager=exp,
        cluster=replace(config.cluster, max_restarts=0),
        trainer=replace(config.trainer, **{loop_name: loop}),
    )


@contextlib.contextmanager
def explained(config: BaseRunConfig, doing: Callable[[], str]) -> Iterator[None]:
    """A failed allocation in the block is raised as an error that names the remedy."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        if not accelerator.is_out_of_memory(error):
            raise
        savers = [" ".join(overrides_of(each)) for each in single_changes(config, saving=True)]
        changes = "; ".join(savers) or "a smaller batch or model"
        lines = str(error).strip().splitlines()
        words = lines[0] if lines else type(error).__name__
        raise DeviceMemoryError(
            f"out of memory in {doing()}, on rank {this_rank()} ({accelerator.description()}): "
            f"{words}\nEach of these saves memory: {changes}. So do more devices, LoRA "
            "(model.peft.peft_scheme=lora) and shorter sequences; `aligner plan` says how much"
        ) from error


# The longest batch -------------------------------------------------------------------------------


def longest_set(
    config: BaseRunConfig, read: Kind, tokenizer: Tokenizer, *readers: GPTArchitecture
) -> Kind:
    """As many items as one step takes, each of the most tokens that the run lets pass.

    ``read``: its training data; ``readers``: the models that the items pass through.
    """
    positions = min(each.max_position_embeddings for each in readers)
    vocab_size = min(tokenizer.vocab_size, *(each.vocab_size for each in readers))
    prompt, length = longest_lengths(config, positions, read=read.max_length)
    generator = torch.Generator().manual_seed(config.seed)

    def random_ids() -> list[int]:
        ids = torch.randint(vocab_size, (prompt or length,), generator=generator)
        return ids.tolist()

    numbers = range(_items_of_step(config))
    items = [_lengthened(read[number % len(read)], random_ids) for number in numbers]
    return type(read)(items, dropped_too_long=read.dropped_too_long)


def _items_of_step(config: BaseRunConfig) -> int:
    if isinstance(config, SamplingRunConfig):
        rollout = config.model.rollout
        return rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
    assert isinstance(config, SupervisedRunConfig), type(config)
    return config.model.global_batch_size // config.rows_per_example


def _lengthened(item: Any, random_ids: Callable[[], list[int]]) -> Any:
    """``item`` with other sequences, of which all but the first token is learned."""
    match item:
        case Prompt():
            return replace(item, text="", ids=random_ids())
        case Example():
            ids = random_ids()
            return replace(item, ids=ids, learned=[(1, len(ids))])
        case Rated():
            return replace(item, example=_lengthened(item.example, random_ids))
        case Pair() | Labelled():
            return item.with_examples([_lengthened(each, random_ids) for each in item.examples])
    raise TypeError(f"no item of a data set: {item!r:.80}")


class MadeUpRewards:
    """Rewards 0 and 1 in turn, whatever the response is.

    Args:
        model: a reward model of the run, which scores sequences as long as those of the rollout,
            of random tokens, and is not listened to; None: there is none.
        seed: of those tokens.
    """

    def __init__(self, model: ModelReward | None, seed: int) -> None:
        self.model, self._seed = model, seed

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row; reads ``input_lengths`` int64 [B]. Texts are empty."""
        if self.model is not None:
            self._ask(self.model, data["input_lengths"].tolist())
        rewards = (torch.arange(data.size) % 2).float()
        return ScoredResponses([""] * data.size, rewards, {})

    def _ask(self, reward: ModelReward, lengths: list[int]) -> None:
        encoder = reward.encoder
        generator = torch.Generator().manual_seed(self._seed)
        sequences = [
            torch.randint(
                encoder.tokenizer.vocab_size,
                (min(length, encoder.max_length),),
                generator=generator,
            ).tolist()
            for length in lengths
        ]
        reward.model.prepare_for_inference()
        reward.model.get_rewards(encoder.collate(sequences), reward.micro_batch_size)
        reward.model.finish_inference()


# The run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The fullest device of a phase: a GPU, or without GPUs a machine; bytes."""

    has_gpu: bool
    allocated: int  # by the tensors of all processes there
    reserved: int  # by all processes there
    beside: int  # on a GPU, by what torch does not count: contexts, NCCL, other programs
    total: int
    rank: int  # of the process that took most
    largest: int  # what it reserved

    @property
    def taken(self) -> int:
        """Everything there."""
        return self.reserved + self.beside

    @property
    def share(self) -> float:
        """Share of the device."""
        return self.taken / self.total


def fullest(uses: Sequence[tuple[int, MemoryUse]]) -> Place:
    """The device on which the processes, each with its rank, took the largest share of memory."""
    devices: dict[str, dict[str, tuple[int, MemoryUse]]] = {}
    for rank, use in uses:  # roles that share a process see the same
        devices.setdefault(use.device, {})[use.process] = (rank, use)
    return max((_place(list(there.values())) for there in devices.values()), key=lambda p: p.share)


def _place(there: Sequence[tuple[int, MemoryUse]]) -> Place:
    uses = [use for _, use in there]
    rank, most = max(there, key=lambda each: each[1].reserved)
    total = most.total
    beside = total - min(use.free for use in uses) - sum(use.held for use in uses)
    return Place(
        most.has_gpu,
        sum(use.allocated for use in uses),
        sum(use.reserved for use in uses),
        max(0, beside) if most.has_gpu else 0,
        total,
        rank,
        most.reserved,
    )


class MeasuredPhases(PhaseTimers):
    """Timers that also look at the memory of every phase, on all ranks."""

    def __init__(self, handles: Sequence[RoleHandle], calls: Calls) -> None:
        super().__init__(synchronize=accelerator.synchronize)
        self._handles, self._calls = handles, calls
        self.current = "between phases"
        self.peaks: dict[str, Place] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the block, unless it raises."""
        for handle in self._handles:
            handle.reset_peak_memory()
        self.current = self._calls.phase = phase
        with super().__call__(phase):
            yield
        self.current = f"what follows {phase}"
        mine = [
            (this_rank() if len(workers) == 1 else place, use)
            for workers in [handle.memory_use() for handle in self._handles]
            for place, use in enumerate(workers)
        ]
        found = fullest([use for rank in gather_objects(mine) for use in rank])
        before = self.peaks.get(phase)
        self.peaks[phase] = found if before is None or found.taken > before.taken else before


@dataclass(frozen=True)
class DryLoop:
    """The loop of a dry run: `STEPS` steps, in the place of `RunLoop`.

    ``roles``: the models of the run; of those that share a process any one would do. ``calls``: of
    their workers.
    """

    config: BaseRunConfig
    learner: Learner
    roles: Sequence[RoleHandle]
    calls: Calls
    console: Console

    def run(self) -> None:
        """Make the steps and print the memory and time of each phase.

        Raises:
            DeviceMemoryError: a phase took more than there is.
        """
        phases, names = MeasuredPhases(self.roles, self.calls), self.calls.names
        names.clear()  # of the set-up

        def doing() -> str:
            role, name = names.get(phases.current, ("run", phases.current))
            return f"{role}, {name}"

        seconds: Mapping[str, float] = {}
        idle: tuple[str, ...] = ()
        with explained(self.config, doing):
            for step in range(1, STEPS + 1):
                self.console.print(f"dry run: step {step} of {STEPS}", highlight=False)
                phases.flush()
                with training_step(step):
                    idle += self.learner.step(step, phases).idle_roles
                seconds = phases.flush()
        self.console.print(report(names, phases.peaks, seconds, idle, accelerator.description()))


# What is said of it ----------------------------------------------------------------------------


def report(
    names: Mapping[str, tuple[str, str]],
    peaks: Mapping[str, Place],
    seconds: Mapping[str, float],
    idle: Sequence[str],
    device: str,
) -> Group:
    """A row for every phase, and what they come to."""
    shown = {phase: peaks[phase] for phase in names if phase in peaks}
    has_gpu = any(place.has_gpu for place in shown.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    memory = ("allocated", "reserved", "beside", "of card")
    for name in ("role", "phase", *(memory if has_gpu else ("resident", "of memory")), "rank", "s"):
        table.add_column(name, justify="left" if name in ("role", "phase") else "right")
    for phase, place in shown.items():
        sizes = [place.allocated, place.reserved, place.beside] if has_gpu else [place.largest]
        table.add_row(
            *names[phase],
            *(f"{size / _GIB:.2f}" for size in sizes),
            f"{place.share:.0%}",
            str(place.rank),
            f"{seconds.get(f'timers/{phase}', 0.0):.2f}",
        )
    phase = max(shown, key=lambda each: shown[each].taken)
    place, (role, name) = shown[phase], names[phase]
    what = _OF_A_CARD if has_gpu else _OF_A_PROCESS
    lines = [
        f"peaks on the fullest device in {what}",
        f"fullest in {role}, {name}: {place.taken / _GIB:.2f} of {place.total / _GIB:.2f} GiB of "
        f"{device if has_gpu else 'the machine'}",
        f"a step on this batch takes {seconds.get('timers/total', 0.0):.2f} s; nothing was saved",
    ]
    skipped = [
        f"updates of the {role} were skipped, for they were not finite: peaks lack its optimizer"
        for role in dict.fromkeys(idle)
    ]
    return Group(table, *map(Text, lines), *(Text(line, "bold red") for line in skipped))
