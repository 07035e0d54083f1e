"""The start-up report: batches, memory and packages of a run, printed before it begins."""

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
from aligner.packages import PackageStatus


@dataclass(frozen=True)
class RoleMemory:
    """Memory that one model needs in one process."""

    name: str  # policy, critic, reference, …
    parameters: int  # number of parameters in the whole model, without adapters
    trainable: bool
    model_parallel_size: int = 1  # number of processes over which the weights are divided
    optimizer_shards: int = 1  # number of processes that divide a part's optimizer state further
    weight_bytes: int = 4  # per parameter: 4 float32, 2 bf16
    gradient_bytes: int = 4  # per parameter, while training
    optimizer_bytes: int = 8  # per parameter: 8 for Adam's two moments, 4 more for a master copy
    adapter_parameters: int = 0  # if positive, only adapters are trained

    @property
    def local_parameters(self) -> int:
        """Number of parameters in this process."""
        return -(-(self.parameters + self.adapter_parameters) // self.model_parallel_size)

    @property
    def learning_parameters(self) -> int:
        """Number of trained parameters in this process."""
        if not self.trainable:
            return 0
        adapters = -(-self.adapter_parameters // self.model_parallel_size)
        return adapters or self.local_parameters

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.local_parameters * self.weight_bytes

    @property
    def gradients(self) -> int:
        """Bytes of the gradients. 0 for a frozen model."""
        return self.learning_parameters * self.gradient_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state. 0 for a frozen model."""
        return -(-self.learning_parameters // self.optimizer_shards) * self.optimizer_bytes

    @property
    def run_state(self) -> int:
        """Bytes that this process writes to a run state: float32 weights and Adam's moments."""
        return -(-self.learning_parameters // self.optimizer_shards) * 12

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state together."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class TrainedRole:
    """Batch sizes of a model that learns from rollouts."""

    name: str  # policy, critic
    global_batch_size: int  # samples per optimizer update, over all ranks
    micro_batch_size: int  # samples per forward-backward pass, per data-parallel rank
    data_parallel_size: int | None = None  # None: the policy's


@dataclass(frozen=True)
class StartupSummary:
    """The content of the start-up report."""

    processes: int
    device: DeviceInfo  # device of the workers
    algorithm: str
    model: str  # path of the policy
    log_dir: str
    batches: Sequence[str]  # sentences about the batches of a step
    roles: Sequence[RoleMemory]
    working_bytes: dict[str, int]  # other memory per process: KV cache, activations, …
    run_states: str  # sentence about how run states are written
    packages: Sequence[PackageStatus]
    restores: Sequence[str] = ()  # what a run state restores: policy, optimizer, …
    restored: tuple[int, str] | None = None  # step and path of the run state. None: a new run
    remarks: Sequence[str] = ()  # sentences about packing, dropout and reproducibility
    notes: Sequence[str] = ()  # warnings, for example about dropped prompts
    is_dry: bool = False  # a dry run saves nothing


def batch_arithmetic(
    rollout: RolloutConfig,
    roles: Sequence[TrainedRole],
    *,
    steps: int,
    train_prompts: int | None,
    data_parallel_size: int,
    passes: int = 1,
) -> list[str]:
    """Return sentences about the batches of a step. A sample is a prompt with one response.

    ``passes``: number of times that ``roles`` train on the same rollout. ``steps``: number of steps
    in the run. ``train_prompts``: number of prompts in the training set, None if unknown.
    """
    # Sampling.
    samples = rollout.num_rollout_samples
    per_prompt = rollout.num_rollouts_per_prompt
    prompts = samples // per_prompt
    per_rank = samples // data_parallel_size
    in_flight = min(per_rank, rollout.rollout_micro_batch_size)
    sentences = [
        f"A step draws {_count(prompts, 'prompt')} and samples {_count(per_prompt, 'response')} to "
        f"each: {_count(samples, 'sample')}, {per_rank:,} on each of "
        f"{_count(data_parallel_size, 'data-parallel rank')}, at most {in_flight:,} of them in "
        "flight together."
    ]
    # Training of each role.
    times = {1: "once", 2: "twice"}.get(passes, f"{passes} times")
    for role in roles:
        updates = passes * samples // role.global_batch_size
        ranks = role.data_parallel_size or data_parallel_size
        micro_batches = role.global_batch_size // (role.micro_batch_size * ranks)
        sentences.append(
            f"The {role.name} trains on them {times} in batches of {role.global_batch_size:,}: "
            f"{_count(updates, 'update')} a step ({steps * updates:,} in the run), each the sum of "
            f"{_count(micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{role.micro_batch_size:,} on every rank."
        )
    # The whole run.
    total = f"{_count(steps, 'step')}: {_count(steps * samples, 'sample')}"
    if train_prompts is not None:
        epoch_steps, remainder = divmod(train_prompts, prompts)
        total += f"; {_count(train_prompts, 'training prompt')} make an epoch of "
        total += _count(epoch_steps, "step")
        if remainder:
            total += f" and {_count(remainder, 'prompt')} left over"
    return [*sentences, total + "."]


def saving_sentence(
    roles: Sequence[RoleMemory], *, in_background: bool, processes_here: int, free_bytes: int
) -> str:
    """Return a sentence about how run states are written and how much host memory this takes."""
    if not in_background:
        return "Run states are written in place (exp_manager.async_save=false)."
    size = sum(role.run_state for role in roles)
    memory = f"a copy takes {readable_bytes(size)} of host memory"
    if processes_here > 1:
        memory += f" on each of {processes_here} processes"
    memory += f", {readable_bytes(free_bytes)} are free"
    way = "while training goes on"
    if size * processes_here > free_bytes:
        way = "in place, and steps with a save wait for the disk"
    return f"Run states are written {way}: {memory}."


def supervised_arithmetic(
    examples: int, updates: int, batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> list[str]:
    """Return sentences about the batches of ``updates`` optimizer steps on ``examples``."""
    per_rank = batch_size // data_parallel_size
    epochs = updates * batch_size / examples
    return [
        f"An update learns from {_count(batch_size, 'example')}, {per_rank:,} on each of "
        f"{_count(data_parallel_size, 'data-parallel rank')} in micro-batches of "
        f"{micro_batch_size:,}.",
        f"{_count(updates, 'update')}: {_count(updates * batch_size, 'example')}, "
        f"{epochs:.3g} times the {_count(examples, 'training example')}.",
    ]


def startup_report(summary: StartupSummary) -> Group:
    """Return the start-up report, for ``console.print``."""
    processes = _count(summary.processes, "process", "processes")
    memory = [_memory_line(summary), *([] if summary.is_dry else [Text(summary.run_states)])]
    packages = [_package_line(status, summary.device.has_gpu) for status in summary.packages]
    indent = (0, 0, 0, 2)
    return Group(
        Text(f"{summary.algorithm} on {processes}: {summary.device.description}", "bold"),
        Text(f"model from {summary.model}\n{_beginning(summary)}"),
        *map(Text, filter(None, summary.remarks)),
        *(Text(note, "yellow") for note in summary.notes),
        Text("\nBatches", "bold"),
        *(Padding(Text(sentence), indent) for sentence in summary.batches),
        Text("\nModels, per process", "bold"),
        _role_table(summary.roles),
        *(Padding(line, indent) for line in memory),
        Text("\nOptional packages", "bold"),
        *(Padding(line, indent) for line in packages),
        Text(),
    )


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
        cells = ("–" if size == 0 else readable_bytes(size) for size in sizes)
        name = role.name if role.trainable else f"{role.name} (frozen)"
        if role.trainable and role.adapter_parameters:
            name += f" (frozen, adapters of {role.adapter_parameters:,})"
        table.add_row(name, f"{role.parameters:,}", *cells)
    return table


def _memory_line(summary: StartupSummary) -> Text:
    models, free = sum(role.total for role in summary.roles), summary.device.free_bytes
    total = models + sum(summary.working_bytes.values())
    sizes = [f"models {readable_bytes(models)}"]
    sizes += [f"{name} {readable_bytes(size)}" for name, size in summary.working_bytes.items()]
    text = f"{' + '.join(sizes)} = about {readable_bytes(total)} of {readable_bytes(free)} free"
    if summary.device.has_gpu:
        text += ", without the device's context, buffers of NCCL and fragmentation"
    if total > free:
        text += ": this may not fit. Lower micro_batch_size or rollout_micro_batch_size, set "
        text += "model.activations_checkpoint_granularity=full or offload_adam_states=true"
    return Text(text, "bold red" if total > free else "")


def _package_line(status: PackageStatus, has_gpu: bool) -> Text:
    package = status.package
    if status.is_installed:
        return Text(f"{package.name} {status.version or 'found'}", "green")
    if package.gpu_only and not has_gpu:
        return Text(f"{package.name} not installed (used on GPUs only)", "dim")
    return Text(f"{package.name} not installed: {package.without}. Get it: {package.install}")


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
