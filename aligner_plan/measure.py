"""One role on one rank of the dry device: every phase of its step, a short piece of each."""

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.config import LengthParams, SamplingOptions
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.decode.responses import Responses
from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.worker import RoleWorker
from aligner.parallel.groups import initialize_parallel
from aligner_plan.amounts import Amounts, Kinds, Measured, extrapolated, fuller, peaks_of
from aligner_plan.dry.device import DeviceKind, DryDevice
from aligner_plan.dry.record import Record
from aligner_plan.roles import Phase, PlannedRole

# Layers of a pipeline stage that are run, of more. FSDP2 gathers layers ahead: from four
# on, as many as in any deeper model.
_DEPTHS = {"megatron": (2, 4), "dtensor": (4, 6)}
_LEAVE = {"prepare_for_training": "finish_training"}
_TOKENS = 5  # of each response that are sampled: from the third on by a CUDA graph


@dataclass(frozen=True)
class MeasuredRole:
    """A role on the rank of one pipeline stage."""

    parameters: float  # of the rank
    static: Kinds  # alive between two updates
    phases: dict[str, Measured]


def measure(role: PlannedRole, stage: int, kind: DeviceKind = "gpu") -> MeasuredRole:
    """Measure the role on a rank of pipeline stage ``stage``, phase by phase, in one step.

    Layers beyond a few are not run: what they take is what the others do. ``kind``: that of the
    `DryDevice`.
    """
    runs = {layers: measure_at(role, stage, layers, kind) for layers in depths_of(role)}
    return joined(runs, role.architecture.num_layers // role.parallel.pipeline)


def depths_of(role: PlannedRole) -> list[int]:
    """Numbers of layers of a pipeline stage from which all of them follow."""
    layers = role.architecture.num_layers // role.parallel.pipeline
    depths = _DEPTHS["dtensor" if role.is_dtensor else "megatron"]
    return [layers] if layers <= depths[-1] else list(depths)


def joined(runs: Mapping[int, MeasuredRole], layers: int) -> MeasuredRole:
    """The role with ``layers`` layers on a pipeline stage, from what it took with others."""
    static = {depth: Measured(Amounts(), {}, run.static) for depth, run in runs.items()}
    (low, some), *more = sorted(runs.items())
    slope = 0.0
    if more:
        high, other = more[0]
        slope = (other.parameters - some.parameters) / (high - low)
    return MeasuredRole(
        some.parameters + slope * (layers - low),
        extrapolated(static, layers).rest,
        {
            name: extrapolated({depth: run.phases[name] for depth, run in runs.items()}, layers)
            for name in some.phases
        },
    )


def measure_at(
    role: PlannedRole,
    stage: int,
    layers: int,
    kind: DeviceKind = "gpu",
    names: Collection[str] | None = None,
) -> MeasuredRole:
    """The role with ``layers`` layers on each pipeline stage.

    ``names``: of the phases to measure; None: all.
    """
    parallel = role.parallel
    architecture = replace(role.architecture, num_layers=layers * parallel.pipeline)
    rank = stage * (role.world // parallel.pipeline)
    dry = DryDevice(role.world, rank, kind=kind)
    with _little_garbage(), dry as device, without_weights(architecture, role):
        run = _RoleRun(device, start_worker(role), role)
        phases = {}
        for phase in role.phases:
            if names is None or phase.name in names:
                phases[phase.name] = run.measure(phase)
            elif phase.method not in ("", "generate", "train"):
                run.touch(phase)
        return MeasuredRole(float(run.role.num_parameters()), run.static, phases)


def start_worker(role: PlannedRole) -> Any:
    """The role's worker in this process, whose place in the role's layout is taken here."""
    cluster = LocalCluster(initialize_parallel(role.parallel))
    group = cluster.start_workers(
        role.worker, role.name, tokenizer=byte_level_tokenizer(), **role.options
    )
    return group.worker


@contextlib.contextmanager
def without_weights(
    architecture: GPTArchitecture, role: PlannedRole, initialize: bool = False
) -> Iterator[None]:
    """Workers build their model of this shape, and read no file; weights are random or unset."""
    attributes = role.options.get("attributes")
    unread = SimpleNamespace(architecture=architecture, weights=_UnsetWeights(architecture))

    def load_model(worker: Any, settings: Any, path: Any, tokenizer: Any) -> Any:
        del path
        if issubclass(worker.model_class, DTensorModel):
            return worker.model_class.from_checkpoint(
                unread, settings=settings, tokenizer=tokenizer
            )
        if attributes:
            settings = replace(settings, attributes=attributes)
        return worker.model_class(
            {"vocab_size": architecture.vocab_size},
            settings=settings,
            architecture=architecture,
            tokenizer=tokenizer,
            initialize=initialize,
        )

    with mock.patch.object(RoleWorker, "load_model", classmethod(load_model)):
        yield


class _UnsetWeights(Mapping[str, Tensor]):
    """Canonical weights of an architecture, whose values are whatever is in memory."""

    def __init__(self, architecture: GPTArchitecture) -> None:
        self._shapes = expected_shapes(architecture)

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """Collections look only at objects made inside, not at all that was imported."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Enough(Exception):
    """Raised when as many tokens were sampled as are measured."""


class _RoleRun:
    """A worker of one role, ready for its phases."""

    def __init__(self, device: DryDevice, worker: Any, role: PlannedRole) -> None:
        self.device, self.worker, self.planned = device, worker, role
        self.role = worker.model
        self.dp_size = worker.parallel.dp_size
        self._name_memory()
        if role.learns:
            self._first_step()
        self._name_memory()
        self.static: Kinds = self._alive()

    def measure(self, phase: Phase) -> Measured:
        """One phase, between those before and after it."""
        match phase.method:
            case "":
                amounts, peaks = self._hand_over(phase)
            case "generate":
                amounts, peaks = self._generate(phase)
            case _:
                amounts, peaks = self._in_parts(phase)
        gc.collect()
        return Measured(amounts, peaks, self._alive())

    def touch(self, phase: Phase) -> None:
        """One micro-batch: megatron-core keeps its largest buffer for what it gathers."""
        self._call(phase, self.planned.micro_batch_size(phase))

    def _first_step(self) -> None:
        """Moments are made in the first update."""
        self.worker.prepare_for_training()
        self.role.optimizer.zero_grad()
        for parameter in self.role.model.parameters():
            if isinstance(parameter, DTensor):  # whose gradients stay until the next update
                parameter.grad = torch.zeros_like(parameter)
        self.role.optimizer.step()
        self.worker.finish_training()

    def _name_memory(self) -> None:
        reference = self.role.__dict__.get("_reference")
        generator = getattr(self.role, "_generator", None)
        copies = (
            getattr(reference, "gpt", None),
            getattr(reference, "copy", None),
            getattr(generator, "_gpt", None),
        )
        for model in (self.role.model, *copies):
            if model is not None:
                self.device.holds(model)

    def _alive(self) -> Kinds:
        return {k: float(size) for k, size in self.device.memory.snapshot().kinds.items()}

    # Micro-batches ----------------------------------------------------------------------------

    def _in_parts(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        """One micro-batch, and one more than pipeline stages, give all of them."""
        rows, size = self.planned.rows(phase), self.planned.micro_batch_size(phase)
        number = -(-rows // size)
        few = self.planned.parallel.pipeline  # micro-batches that are on their way at once
        first, whole = self._call(phase, rows if number <= few else size)
        amounts, peaks = Amounts.of(first), peaks_of(whole)
        moved = Amounts.of(whole).plus(amounts, -1.0)
        if number > few:
            more, whole = self._call(phase, (few + 1) * size)
            step = Amounts.of(more).plus(amounts, -1.0)
            amounts = amounts.plus(step, (rows / size - 1) / few)
            peaks = fuller(peaks, peaks_of(whole))
        return moved.plus(amounts, phase.times), peaks

    def _call(self, phase: Phase, rows: int) -> tuple[Record, Record]:
        """Records of the passes over ``rows`` rows of this rank, and of the whole phase."""
        with self.device.record() as whole:
            getattr(self.worker, phase.enter)()
            with self.device.record() as passes:
                call_worker(self.worker, self.planned, phase, rows)
            self._name_memory()
            getattr(self.worker, _LEAVE.get(phase.enter, "finish_inference"))()
        return passes, whole

    # Generation -------------------------------------------------------------------------------

    def _generate(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        """The first tokens, and the last: the cost of a token grows with the length before it.

        The step that is carried on is the last one sampled, which a CUDA graph launches where the
        generator has them. Captures, and first steps of a shape, are left out.
        """
        worker = self.worker
        with self.device.record() as ready:
            worker.prepare_for_generation()
        moved = Amounts.of(ready)
        self._name_memory()
        if not worker.parallel.is_last_stage:  # which would receive the sampled tokens
            return moved, {"": self._alive()}
        begin = self._sample(phase, phase.length, phase.response)
        late = phase.length + max(0, phase.response - _TOKENS)
        end = self._sample(phase, late, phase.length + phase.response - late)
        self.role.release_generator()  # its cache and graphs are counted in this phase only
        with self.device.record() as left:
            worker.finish_generation()
        moved = moved.plus(Amounts.of(left))
        amounts = Amounts.of(begin[0])
        if phase.response > 1:
            mean = Amounts().plus(_step(begin), 0.5).plus(_step(end), 0.5)
            amounts = amounts.plus(mean, phase.response - 1.0)
        peaks = peaks_of(ready)
        for record in (*begin, *end):
            peaks = fuller(peaks, peaks_of(record))
        return moved.plus(amounts, self.planned.rows(phase) / self.planned.slots(phase)), peaks

    def _sample(self, phase: Phase, prompt: int, response: int) -> list[Record]:
        """Prefill and the first token; each step after it, with what the host reads meanwhile.

        The host reads a step while the next one runs, so the last step that is measured whole is
        ended by the one after it.
        """
        rollout, slots = self.planned.model.rollout, self.planned.slots(phase)
        numbers = torch.arange(slots) // rollout.num_rollouts_per_prompt
        ids = (numbers[:, None] + torch.arange(prompt)) % 200
        ids[:, 0] = numbers // 200  # no two prompts are the same
        data: BatchedDataDict = BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": torch.full((slots,), prompt),
                "sample_ids": torch.arange(slots),
            }
        )
        lengths = LengthParams(min_length=response, max_length=response)
        advance = Responses.advance
        with contextlib.ExitStack() as stack:
            records = [stack.enter_context(self.device.record())]

            def measured(*args: Any, **kwargs: Any) -> None:
                stack.close()
                if len(records) == _TOKENS:
                    raise _Enough
                records.append(stack.enter_context(self.device.record()))
                advance(*args, **kwargs)

            with contextlib.suppress(_Enough), mock.patch.object(Responses, "advance", measured):
                self.worker.generate(
                    data,
                    seed=1,
                    sampling_options=SamplingOptions(lengths, rollout.sampling_params),
                )
        return records

    # Beside the step --------------------------------------------------------------------------

    def _hand_over(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        with self.device.record() as record:
            if phase.name == "save":  # every tensor of it is written from host memory
                state = tree_leaves(self.worker.state_dict())
                tensors = [
                    each
                    for each in state
                    if isinstance(each, Tensor) and self.device.memory.holds(each)
                ]
                record.copied_bytes += sum(each.nbytes for each in tensors)
            else:
                self.worker.offload_before_refit()
                buffer = torch.empty(
                    phase.buffer_bytes, dtype=torch.uint8, device=accelerator.device()
                )
                for _, tensor in self.worker.hf_weights(self.worker.hf_weight_names()):
                    tensor.clone()  # into the buffer, or on its way
                del buffer
                self.worker.offload_after_refit()
        return Amounts.of(record), peaks_of(record)


def _step(records: list[Record]) -> Amounts:
    """The last step with the fewest launches: others capture a graph, or are before that."""
    return Amounts.of(min(records[:0:-1], key=lambda record: record.launches))


def call_worker(worker: Any, role: PlannedRole, phase: Phase, rows: int) -> None:
    """Call the phase's method with ``rows`` rows, in the micro-batches that a handle would form."""
    batching: Any = role.batching(phase)
    shards: Any = phase.batch(rows).shard_by_batch_size(1, batch_size=rows, **batching)
    options = dict(phase.options)
    if phase.is_update:
        size = rows * role.parallel.data_size(role.world)
        options |= {"gbs": size, "mbs": min(options["mbs"], rows)}
    getattr(worker, phase.method)(data=shards[0][0] if batching else shards[0], **options)
