"""Measurement of one role on one rank of the dry device: a short piece of every phase of a step.

worker with few layers ─► first update ─► phase: 1 micro-batch, p + 1 micro-batches ─► all rows
                                          generation: first tokens, last tokens ─► response
"""

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

from aligner.algorithms.run.startup import shapes_of
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.any_model import model_config
from aligner.config import LengthParams, SamplingOptions
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.decode.responses import Responses
from aligner.models.gpt.dtensor.decoding import SlotDecoder
from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.ways import ModelForm, keyed_form
from aligner.models.worker import RoleWorker
from aligner.parallel.groups import initialize_parallel
from aligner_plan.amounts import Amounts, Kinds, Measured, extrapolated, higher_peaks, peaks_of
from aligner_plan.dry.device import DeviceKind, DryDevice
from aligner_plan.dry.record import Record
from aligner_plan.roles import Phase, PlannedRole

# Layers of a pipeline stage that are run if the stage has more. FSDP2 gathers layers ahead: from
# four layers on, it gathers as many as in any deeper model.
_DEPTHS = {"megatron": (2, 4), "dtensor": (4, 5)}
_LEAVE = {"prepare_for_training": "finish_training"}
_TOKENS = 5  # sampled tokens of each response. From the third on a CUDA graph samples them


@dataclass(frozen=True)
class MeasuredRole:
    """A role on the rank of one pipeline stage."""

    parameters: float  # of the rank
    static: Kinds  # alive between two updates
    phases: dict[str, Measured]


def measure(role: PlannedRole, stage: int, kind: DeviceKind = "gpu") -> MeasuredRole:
    """Measure the role on a rank of pipeline stage ``stage`` in all phases of one step.

    Only a few layers are run, and the others are extrapolated. ``kind``: kind of the `DryDevice`.
    """
    runs = {layers: measure_at(role, stage, layers, kind) for layers in depths_of(role)}
    return joined(runs, stage_layers(role))


def stage_layers(role: PlannedRole) -> int:
    """Return the layers of each pipeline stage."""
    return role.architecture.num_layers // role.parallel.pipeline


def depths_of(role: PlannedRole) -> list[int]:
    """Return the numbers of layers per pipeline stage that are measured."""
    layers = stage_layers(role)
    architecture = role.architecture
    special = architecture.layers_without_rope + architecture.layers_without_window
    dense = architecture.layers_without_experts
    if special or dense != (*range(len(dense)),) or not architecture.has_table:
        return [layers]  # its layers can differ from each other
    # All runs have the first layers, which may lack experts.
    depths = [len(dense) + n for n in _DEPTHS["dtensor" if role.is_dtensor else "megatron"]]
    return [layers] if layers <= depths[-1] else depths


def joined(runs: Mapping[int, MeasuredRole], layers: int) -> MeasuredRole:
    """Extrapolate the role to ``layers`` layers per stage from runs with other numbers of them."""
    static = {depth: Measured(Amounts(), {}, run.static) for depth, run in runs.items()}
    (low, shallow), *more = sorted(runs.items())
    slope = 0.0
    if more:
        high, deep = more[0]
        slope = (deep.parameters - shallow.parameters) / (high - low)
    return MeasuredRole(
        shallow.parameters + slope * (layers - low),
        extrapolated(static, layers).remaining,
        {
            name: extrapolated({depth: run.phases[name] for depth, run in runs.items()}, layers)
            for name in shallow.phases
        },
    )


def measure_at(
    role: PlannedRole,
    stage: int,
    layers: int,
    kind: DeviceKind = "gpu",
    names: Collection[str] | None = None,
) -> MeasuredRole:
    """Measure the role with ``layers`` layers on each pipeline stage.

    ``names``: names of the phases to measure. None: all.
    """
    parallel = role.parallel
    architecture = replace(role.architecture, num_layers=layers * parallel.pipeline)
    rank = stage * (role.world // parallel.pipeline)
    device = DryDevice(role.world, rank, kind=kind)
    # The garbage collector then only looks at objects of the block, not at all imported ones.
    gc.freeze()
    try:
        with device, without_weights(architecture, role):
            run = _RoleRun(device, start_worker(role), role)
            phases = {}
            for phase in role.phases:
                if names is None or phase.name in names:
                    phases[phase.name] = run.measure(phase)
                elif phase.method not in ("", "generate", "train"):
                    run.touch(phase)
            return MeasuredRole(float(run.role.num_parameters()), run.static, phases)
    finally:
        gc.unfreeze()


def start_worker(role: PlannedRole) -> Any:
    """Start the role's worker in this process, on this process's rank of the role's layout."""
    cluster = LocalCluster(initialize_parallel(role.parallel))
    group = cluster.start_workers(
        role.worker, role.name, tokenizer=byte_level_tokenizer(), **role.options
    )
    return group.worker


@contextlib.contextmanager
def without_weights(
    architecture: GPTArchitecture, role: PlannedRole, initialize: bool = False
) -> Iterator[None]:
    """Let workers build a model of this architecture without a file.

    ``initialize``: the weights are random. Otherwise they are unset.
    """
    attributes = role.options.get("attributes")
    weights = _UnsetWeights(architecture)
    source = SimpleNamespace(architecture=architecture, weights=weights, config={})

    def load_model(worker: Any, settings: Any, path: Any, tokenizer: Any) -> Any:
        del path
        if issubclass(worker.model_class(), DTensorModel):
            return worker.model_class().from_checkpoint(
                source, settings=settings, tokenizer=tokenizer
            )
        if attributes:
            settings = replace(settings, attributes=attributes)
        return worker.model_class()(
            {"vocab_size": architecture.vocab_size},
            settings=settings,
            architecture=architecture,
            tokenizer=tokenizer,
            initialize=initialize,
        )

    form_of = DTensorModel._form_of

    def assumed_form(model: Any, opened: Any) -> ModelForm:
        """Return the form that most types have, because its tests need weights."""
        if architecture.has_table:
            return form_of(model, opened)
        decoder = SlotDecoder if model.samples else None
        return ModelForm(logits=keyed_form(model_config(architecture)), decoder=decoder)

    with (
        mock.patch.object(RoleWorker, "load_model", classmethod(load_model)),
        mock.patch.object(DTensorModel, "_form_of", assumed_form),
    ):
        yield


class _UnsetWeights(Mapping[str, Tensor]):
    """Canonical weights of an architecture with undefined values."""

    def __init__(self, architecture: GPTArchitecture) -> None:
        self._shapes = shapes_of(architecture)

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class _LastToken(Exception):
    """Raised when all measured tokens are sampled."""


class _RoleRun:
    """A worker of one role, ready for its phases."""

    def __init__(self, device: DryDevice, worker: Any, role: PlannedRole) -> None:
        self.device, self.worker, self.planned = device, worker, role
        self.role = worker.model
        self._name_memory()
        if role.learns:
            self._first_step()
        self._name_memory()
        self.static: Kinds = self._alive()

    def measure(self, phase: Phase) -> Measured:
        """Measure one phase, after the phases before it."""
        match phase.method:
            case "":
                amounts, peaks = self._transfer(phase)
            case "generate":
                amounts, peaks = self._generate(phase)
            case _:
                amounts, peaks = self._in_parts(phase)
        gc.collect()
        return Measured(amounts, peaks, self._alive())

    def touch(self, phase: Phase) -> None:
        """Run one micro-batch: megatron-core keeps its largest buffer for gathered tensors."""
        self._call(phase, self.planned.micro_batch_size(phase))

    def _first_step(self) -> None:
        """Make the first update, which creates the optimizer's moments."""
        self.worker.prepare_for_training()
        self.role.optimizer.zero_grad()
        for parameter in self.role.model.parameters():
            if isinstance(parameter, DTensor):  # whose gradients exist until the next update
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
                self.device.name_memory(model)

    def _alive(self) -> Kinds:
        return {k: float(size) for k, size in self.device.memory.snapshot().kinds.items()}

    # Micro-batches ----------------------------------------------------------------------------

    def _in_parts(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        """Extrapolate to all micro-batches from one, and from one more than pipeline stages."""
        rows, size = self.planned.rows(phase), self.planned.micro_batch_size(phase)
        count = -(-rows // size)
        stages = self.planned.parallel.pipeline  # micro-batches in flight at once
        passes, record = self._call(phase, rows if count <= stages else size)
        amounts, peaks = Amounts.of(passes), peaks_of(record)
        around = Amounts.of(record).plus(amounts, -1.0)  # of entering and leaving the phase
        if count > stages:
            more_passes, record = self._call(phase, (stages + 1) * size)
            difference = Amounts.of(more_passes).plus(amounts, -1.0)
            amounts = amounts.plus(difference, (rows / size - 1) / stages)
            peaks = higher_peaks(peaks, peaks_of(record))
        return around.plus(amounts, phase.times), peaks

    def _call(self, phase: Phase, rows: int) -> tuple[Record, Record]:
        """Record the passes over ``rows`` rows of this rank, and the complete phase."""
        with self.device.record() as record:
            getattr(self.worker, phase.enter)()
            with self.device.record() as passes:
                call_worker(self.worker, self.planned, phase, rows)
            self._name_memory()
            getattr(self.worker, _LEAVE.get(phase.enter, "finish_inference"))()
        return passes, record

    # Generation -------------------------------------------------------------------------------

    def _generate(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        """Measure the first and the last tokens: the cost of a token grows with its position.

        The cost between them is linear. It is taken from steps that a CUDA graph launches, if the
        generator uses graphs, and not from captures or the first steps of a shape.
        """
        worker = self.worker
        with self.device.record() as ready:
            worker.prepare_for_generation()
        around = Amounts.of(ready)
        self._name_memory()
        if not worker.parallel.is_last_stage:  # which would receive the sampled tokens
            return around, {"": self._alive()}
        # The beginning and the end of a response.
        begin = self._sample(phase, phase.length, phase.response)
        late = phase.length + max(0, phase.response - _TOKENS)
        end = self._sample(phase, late, phase.length + phase.response - late)
        self.role.release_generator()  # its cache and graphs count for this phase only
        with self.device.record() as finished:
            worker.finish_generation()
        around = around.plus(Amounts.of(finished))
        # The first token, and the mean of the others.
        amounts = Amounts.of(begin[0])
        if phase.response > 1:
            mean = Amounts().plus(_step(begin), 0.5).plus(_step(end), 0.5)
            amounts = amounts.plus(mean, phase.response - 1.0)
        peaks = peaks_of(ready)
        for record in (*begin, *end):
            peaks = higher_peaks(peaks, peaks_of(record))
        return around.plus(amounts, self.planned.rows(phase) / self.planned.slots(phase)), peaks

    def _sample(self, phase: Phase, prompt: int, response: int) -> list[Record]:
        """Record prefill with the first token, then each later step with its host reads.

        The host reads the result of a step while the next one runs. The last complete record
        therefore ends with the step after it.
        """
        rollout, slots = self.planned.model.rollout, self.planned.slots(phase)
        # Different prompts.
        prompt_ids = torch.arange(slots) // rollout.num_rollouts_per_prompt
        ids = (prompt_ids[:, None] + torch.arange(prompt)) % 200
        ids[:, 0] = prompt_ids // 200
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

            def recorded_advance(*args: Any, **kwargs: Any) -> None:
                stack.close()
                if len(records) == _TOKENS:
                    raise _LastToken
                records.append(stack.enter_context(self.device.record()))
                advance(*args, **kwargs)

            stop = contextlib.suppress(_LastToken)
            with stop, mock.patch.object(Responses, "advance", recorded_advance):
                self.worker.generate(
                    data, seed=1, sampling_options=SamplingOptions(lengths, rollout.sampling_params)
                )
        return records

    # Outside the step -------------------------------------------------------------------------

    def _transfer(self, phase: Phase) -> tuple[Amounts, dict[str, Kinds]]:
        """Measure `save` or `refit`."""
        with self.device.record() as record:
            if phase.name == "save":  # every tensor is written from host memory
                record.copied_bytes += sum(
                    leaf.nbytes
                    for leaf in tree_leaves(self.worker.state_dict())
                    if isinstance(leaf, Tensor) and self.device.memory.holds(leaf)
                )
            else:
                self.worker.offload_before_refit()
                buffer = torch.empty(
                    phase.buffer_bytes, dtype=torch.uint8, device=accelerator.device()
                )
                for _, tensor in self.worker.hf_weights(self.worker.hf_weight_names()):
                    tensor.clone()  # into the buffer, or to the engine
                del buffer
                self.worker.offload_after_refit()
        return Amounts.of(record), peaks_of(record)


def _step(records: list[Record]) -> Amounts:
    """Return the last step with the fewest launches. Others precede or capture a graph."""
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
