"""The start-up report: a summary of the run, in words and numbers, before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aligner.checkpoint.durable import readable_bytes
from aligner.config import RolloutConfig
from aligner.device.accelerator import DeviceInfo
from aligner.observe.memory import RoleMemory
from aligner.packages import PackageStatus


@dataclass(frozen=True)
class TrainedRole:
    """Training of one role on a rollout."""

    name: str  # policy, critic
    global_batch_size: int  # samples per optimizer update, over all ranks
    micro_batch_size: int  # samples per forward-backward, per data-parallel rank
    data_parallel_size: int | None = None  # None: the policy's
    model_parallel_size: int | None = None  # None: the policy's


@dataclass(frozen=True)
class StartupSummary:
    """Content of the report."""

    processes: int
    device: DeviceInfo  # of the workers
    algorithm: str  # its name
    model: str  # where the policy comes from
    log_dir: str
    batches: Sequence[str]  # how many of what makes a step, one sentence each
    roles: Sequence[RoleMemory]
    working_bytes: dict[str, int]  # further memory per process: KV cache, activations, …
    run_states: str  # how they are written, a sentence
    packages: Sequence[PackageStatus]
    restores: Sequence[str] = ()  # what a run state brings back: policy, optimizer, …
    restored: tuple[int, str] | None = None  # step and path of the run state; None: a new run
    dropout: str = ""  # of the models that are trained, in words
    repetition: str = ""  # what may differ when the run is repeated, in words
    notes: Sequence[str] = ()  # e.g. prompts that were dropped
    is_dry: bool = False  # nothing is saved


def batch_arithmetic(
    rollout: RolloutConfig,
    roles: Sequence[TrainedRole],
    *,
    steps: int,
    train_prompts: int | None,
    data_parallel_size: int,
    passes: int = 1,
) -> list[str]:
    """Arithmetic of the batches of a step, one sentence each.

    A sample is a prompt with one response. ``roles`` go ``passes`` times over every rollout;
    ``train_prompts`` is None for a generator without a known end.
    """
    samples, per_prompt = rollout.num_rollout_samples, rollout.num_rollouts_per_prompt
    prompts, per_rank = samples // per_prompt, samples // data_parallel_size
    in_flight = min(per_rank, rollout.rollout_micro_batch_size)
    sentences = [
        f"A step draws {_count(prompts, 'prompt')} and samples "
        f"{_count(per_prompt, 'response')} to each: "
        f"{_count(samples, 'sample')}, {per_rank:,} on each of "
        f"{_count(data_parallel_size, 'data-parallel rank')}, at most {in_flight:,} of them "
        "in flight together."
    ]
    times = {1: "once", 2: "twice"}.get(passes, f"{passes} times")
    for role in roles:
        updates = passes * samples // role.global_batch_size
        ranks = role.data_parallel_size or data_parallel_size
        micro_batches = role.global_batch_size // (role.micro_batch_size * ranks)
        sentences.append(
            f"The {role.name} goes over them {times} in batches of "
            f"{role.global_batch_size:,}: {_count(updates, 'update')} a step "
            f"({steps * updates:,} in the run), each the sum of "
            f"{_count(micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{role.micro_batch_size:,} on every rank."
        )
    total = f"{_count(steps, 'step')}: {_count(steps * samples, 'sample')}"
    if train_prompts is not None:
        epoch, rest = divmod(train_prompts, prompts)
        left = f" and {_count(rest, 'prompt')} left over" if rest else ""
        total += f"; {_count(train_prompts, 'training prompt')} make an epoch of "
        total += f"{_count(epoch, 'step')}{left}"
    return [*sentences, total + "."]


def saving_sentence(
    roles: Sequence[RoleMemory], *, in_background: bool, processes_here: int, free_bytes: int
) -> str:
    """Sentence on how run states are written, and on the memory of a copy of one.

    ``processes_here``: of the run on this machine; ``free_bytes``: of its memory.
    """
    if not in_background:
        return "Run states are written in place (exp_manager.async_save=false)."
    size = sum(role.run_state for role in roles)
    taken = f"a copy takes {readable_bytes(size)} of host memory"
    if processes_here > 1:
        taken += f" on each of {processes_here} processes"
    taken += f", {readable_bytes(free_bytes)} are free"
    if size * processes_here > free_bytes:
        return f"Run states are written in place, and steps with a save wait for the disk: {taken}."
    return f"Run states are written while training goes on: {taken}."


def supervised_arithmetic(
    examples: int, updates: int, batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> list[str]:
    """The same of a supervised run: ``updates`` of ``batch_size`` out of ``examples``."""
    per_rank = batch_size // data_parallel_size
    epochs = updates * batch_size / examples
    return [
        f"An update learns from {_count(batch_size, 'example')}, {per_rank:,} on each of "
        f"{_count(data_parallel_size, 'data-parallel rank')} in micro-batches of "
        f"{micro_batch_size:,}.",
        f"{_count(updates, 'update')}: {_count(updates * batch_size, 'example')}, "
        f"{epochs:.3g} times the {_count(examples, 'training example')}.",
    ]


def memory_estimate(summary: StartupSummary) -> dict[str, int]:
    """Bytes per process: ``<role> weights``, ``… gradients``, ``… optimizer``, working memory."""
    parts = {
        f"{role.name} {part}": getattr(role, part)
        for role in summary.roles
        for part in ("weights", "gradients", "optimizer")
    }
    return {name: size for name, size in {**parts, **summary.working_bytes}.items() if size}


def startup_report(summary: StartupSummary) -> Group:
    """The report for the console; ``console.print`` it."""
    processes = _count(summary.processes, "process", "processes")
    return Group(
        Text(f"{summary.algorithm} on {processes}: {summary.device.description}", "bold"),
        Text(f"model from {summary.model}\n{_beginning(summary)}"),
        *(Text(line) for line in (summary.dropout, summary.repetition) if line),
        *(Text(note, "yellow") for note in summary.notes),
        Text("\nBatches", "bold"),
        *(_indented(Text(sentence)) for sentence in summary.batches),
        Text("\nModels, per process", "bold"),
        _role_table(summary.roles),
        _indented(_memory_line(summary)),
        *(() if summary.is_dry else (_indented(Text(summary.run_states)),)),
        Text("\nOptional packages", "bold"),
        *(_indented(_package_line(status, summary.device.has_gpu)) for status in summary.packages),
        Text(),
    )


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))


def _beginning(summary: StartupSummary) -> str:
    if summary.is_dry:
        return "a dry run on the longest batch, of random tokens: no directory is read or written"
    begins = "a new run: no run state was found"
    if summary.restored is not None:
        step, path = summary.restored
        begins = f"resumed after step {step} from {path}: {', '.join(summary.restores)} restored"
    return f"results in {summary.log_dir}\n{begins}"


def _role_table(roles: Sequence[RoleMemory]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("role")
    for column in ("parameters", "weights", "gradients", "optimizer", "together"):
        table.add_column(column, justify="right")
    for role in roles:
        sizes = (role.weights, role.gradients, role.optimizer, role.total)
        shown = ("–" if size == 0 else readable_bytes(size) for size in sizes)
        name = role.name if role.trainable else f"{role.name} (frozen)"
        if role.trainable and role.adapter_parameters:
            name += f" (frozen, adapters of {role.adapter_parameters:,})"
        table.add_row(name, f"{role.parameters:,}", *shown)
    return table


def _memory_line(summary: StartupSummary) -> Text:
    total = sum(memory_estimate(summary).values())
    working = "".join(
        f" + {name} {readable_bytes(size)}" for name, size in summary.working_bytes.items()
    )
    models = readable_bytes(sum(role.total for role in summary.roles))
    text = (
        f"models {models}{working} = about {readable_bytes(total)} of "
        f"{readable_bytes(summary.device.free_bytes)} free"
    )
    if summary.device.has_gpu:
        text += ", without the device's context, buffers of NCCL and fragmentation"
    if total <= summary.device.free_bytes:
        return Text(text)
    advice = (
        ": this may not fit. Lower micro_batch_size or rollout_micro_batch_size, set "
        "model.activations_checkpoint_granularity=full or offload_adam_states=true"
    )
    return Text(text + advice, "bold red")


def _package_line(status: PackageStatus, has_gpu: bool) -> Text:
    package = status.package
    if status.is_installed:
        return Text(f"{package.name} {status.version or 'found'}", "green")
    if package.gpu_only and not has_gpu:
        return Text(f"{package.name} not installed (used on GPUs only)", "dim")
    return Text(f"{package.name} not installed: {package.without}. Get it: {package.install}")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
