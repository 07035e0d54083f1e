"""One role on one rank of the dry device: every phase of its step, a short piece of each."""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aligner.architecture import GPTArchitecture
from aligner.config import Drawing, LengthParams, TrainedModelConfig
from aligner.data.byte_tokenizer import byte_level_tokenizer
from aligner.distributed import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from aligner.distributed.parallel import initialize_parallel
from aligner.distributed.worker_groups import LocalCluster
from aligner.dry.device import DeviceKind, DryDevice
from aligner.dry.record import Record
from aligner.models.policy.workers import megatron_policy_worker
from aligner.models.reward.workers import megatron_reward_worker
from aligner.models.sharded import micro_batching
from aligner.models.value.workers import megatron_value_worker
from aligner.plan.amounts import Amounts, Kinds, Measured, extrapolated, fuller, peaks_of
from aligner.plan.roles import Generate, HandOver, Phase, PlannedRole, Rows, Score, Train

_DEPTHS = (2, 4)  # layers of a pipeline stage that are run where there are more
_TOKENS = 5  # of each response that are drawn: from the third on by a CUDA graph


@dataclass(frozen=True)
class MeasuredRole:
    """A role on the rank of one pipeline stage."""

    parameters: float  # of the rank
    static: Kinds  # alive between two updates
    phases: dict[str, Measured]


def measure(role: PlannedRole, stage: int, kind: DeviceKind = "gpu") -> MeasuredRole:
    """What the role takes on a rank of pipeline stage ``stage``, phase by phase, in one step.

    Layers beyond a few are not run: what they take is what the others do. ``kind``: that of the
    `DryDevice`.
    """
    layers = role.architecture.num_layers // role.parallel.pipeline
    depths = [layers] if layers <= _DEPTHS[-1] else list(_DEPTHS)
    runs = {depth: _measure_at(role, stage, depth, kind) for depth in depths}
    static = {depth: Measured(Amounts(), {}, run.static) for depth, run in runs.items()}
    some = next(iter(runs.values()))
    counts = [runs[depth].parameters for depth in depths]
    slope = 0.0 if len(depths) == 1 else (counts[1] - counts[0]) / (depths[1] - depths[0])
    return MeasuredRole(
        counts[0] + slope * (layers - depths[0]),
        extrapolated(static, layers).rest,
        {
            name: extrapolated({depth: run.phases[name] for depth, run in runs.items()}, layers)
            for name in some.phases
        },
    )


def _measure_at(
    role: PlannedRole, stage: int, layers: int, kind: DeviceKind = "gpu"
) -> MeasuredRole:
    """The role with ``layers`` layers on each pipeline stage."""
    parallel = role.parallel
    architecture = replace(role.architecture, num_layers=layers * parallel.pipeline)
    rank = stage * (role.world // parallel.pipeline)
    dry = DryDevice(role.world, rank, kind=kind)
    with dry as device, without_weights(architecture, role.attributes):
        place = initialize_parallel(parallel)
        front = role.start(LocalCluster(place), byte_level_tokenizer())
        run = _RoleRun(device, front.worker_group.worker, role)  # type: ignore[attr-defined]
        phases = {phase.name: run.measure(phase) for phase in role.phases}
        return MeasuredRole(float(run.role.num_parameters()), run.static, phases)


@contextlib.contextmanager
def without_weights(
    architecture: GPTArchitecture, attributes: tuple[str, ...] = (), initialize: bool = False
) -> Iterator[None]:
    """Workers build their model of this shape, and read no file; weights are random or unset."""

    def build(cls: Any, settings: Any, *, restore_path: Any, tokenizer: Any) -> Any:
        del restore_path
        if attributes:
            settings = replace(settings, attributes=attributes)
        return cls(
            {"vocab_size": architecture.vocab_size},
            settings=settings,
            architecture=architecture,
            tokenizer=tokenizer,
            initialize=initialize,
        )

    with contextlib.ExitStack() as stack:
        for module in (megatron_policy_worker, megatron_value_worker, megatron_reward_worker):
            stack.enter_context(mock.patch.object(module, "load_from_nemo", build))
        yield


class _Enough(Exception):
    """As many tokens as are to be looked at were drawn."""


class _RoleRun:
    """A worker of one role, ready for its phases."""

    def __init__(self, device: DryDevice, worker: Any, role: PlannedRole) -> None:
        self.device, self.worker, self.planned = device, worker, role
        self.role = worker.model
        self.dp_size = worker.parallel.dp_size
        self._name_memory()
        for phase in role.phases:
            if isinstance(phase, Train):
                self._first_step()
        self._name_memory()
        self.static: Kinds = self._alive()

    def measure(self, phase: Phase) -> Measured:
        """One phase, between those before and after it."""
        match phase:
            case Train():
                amounts, peaks = self._in_parts(phase, self._train)
            case Score():
                amounts, peaks = self._in_parts(phase, self._score)
            case Generate():
                amounts, peaks = self._generate(phase)
            case HandOver():
                amounts, peaks = self._hand_over(phase)
        gc.collect()
        return Measured(amounts, peaks, self._alive())

    def _first_step(self) -> None:
        """Moments are made in the first update."""
        self.worker.prepare_for_training()
        self.role.optimizer.zero_grad()
        self.role.optimizer.step()
        self.worker.finish_training()

    def _name_memory(self) -> None:
        self.device.holds(self.role.model)
        reference = self.role.__dict__.get("_reference")
        if reference is not None and reference.gpt is not None:
            self.device.holds(reference.gpt)

    def _alive(self) -> Kinds:
        return {k: float(size) for k, size in self.device.memory.snapshot().kinds.items()}

    # Micro-batches ----------------------------------------------------------------------------

    def _in_parts(self, phase: Train | Score, do: Any) -> tuple[Amounts, dict[str, Kinds]]:
        """One and two micro-batches (as many as pipeline stages, and one more) give all of them."""
        rows = phase.rows
        size = self._rows_of_micro_batch(phase)
        number = -(-rows.count // size)
        few = min(number, self.planned.parallel.pipeline)
        first: Record = do(phase, replace(rows, count=min(rows.count, few * size)))
        amounts, peaks = Amounts.of(first), peaks_of(first)
        if number > few:
            more: Record = do(phase, replace(rows, count=(few + 1) * size))
            step = Amounts.of(more).plus(amounts, -1.0)
            amounts = amounts.plus(step, rows.count / size - few)
            peaks = fuller(peaks, peaks_of(more))
        return Amounts().plus(amounts, rows.times), peaks

    def _rows_of_micro_batch(self, phase: Train | Score) -> int:
        rows = phase.rows
        size = phase.micro_batch_size
        batching = _batching(self.planned.model, phase)
        if batching:
            (options,) = batching.values()
            multiple = options.get("sequence_length_round") or options.get(
                "sequence_length_pad_multiple", 1
            )
            length = math.ceil(rows.length / multiple) * multiple
            size = options["max_tokens_per_microbatch"] // length // rows.together * rows.together
        return max(rows.together, min(size, rows.count))

    def _train(self, phase: Train, rows: Rows) -> Record:
        self.worker.prepare_for_training()
        with self.device.record() as record:
            self.worker.train(
                data=share_of(self.planned.model, phase, rows),
                loss_fn=phase.loss,
                gbs=rows.count * self.dp_size,
                mbs=min(phase.micro_batch_size, rows.count),
            )
        self.worker.finish_training()
        return record

    def _score(self, phase: Score, rows: Rows) -> Record:
        with self.device.record() as record:
            getattr(self.worker, phase.enter)()
            data = share_of(self.planned.model, phase, rows)
            size = None if _batching(self.planned.model, phase) else phase.micro_batch_size
            getattr(self.worker, phase.call)(data=data, micro_batch_size=size, **phase.options)
        if phase.leave is not None:
            getattr(self.worker, phase.leave)()
        return record

    # Generation -------------------------------------------------------------------------------

    def _generate(self, phase: Generate) -> tuple[Amounts, dict[str, Kinds]]:
        """The first tokens, and the last: what a token takes grows with what stands before it.

        The step that is carried on is the last one drawn, which a CUDA graph launches where the
        generator has them. Captures, and first steps of a shape, are left out.
        """
        worker = self.worker
        worker.prepare_for_generation()
        if not worker.parallel.is_last_stage:  # which it would be told what was drawn by
            return Amounts(), {"": self._alive()}
        begin = self._draw(phase, phase.prompt, phase.response)
        late = phase.prompt + max(0, phase.response - _TOKENS)
        end = self._draw(phase, late, phase.prompt + phase.response - late)
        worker.finish_generation()
        (start, *_, early), (*_, last) = begin, end
        waves = phase.rows / phase.slots
        mean = Amounts().plus(Amounts.of(early), 0.5).plus(Amounts.of(last), 0.5)
        amounts = Amounts.of(start).plus(mean, phase.response - 1.0)
        peaks: dict[str, Kinds] = {}
        for record in (*begin, *end):
            peaks = fuller(peaks, peaks_of(record))
        return Amounts().plus(amounts, waves), peaks

    def _draw(self, phase: Generate, prompt: int, response: int) -> list[Record]:
        """Prefill and the first token; each token after it."""
        prompts = -(-phase.slots // phase.per_prompt)
        numbers = torch.arange(prompts).repeat_interleave(phase.per_prompt)[: phase.slots]
        ids = (numbers[:, None] + torch.arange(prompt)) % 200
        ids[:, 0] = numbers // 200  # no two prompts are the same
        data: BatchedDataDict = BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": torch.full((phase.slots,), prompt),
                "sample_ids": torch.arange(phase.slots),
            }
        )
        sampling = phase.sampling
        with contextlib.ExitStack() as stack:
            drawn = 0
            records = [stack.enter_context(self.device.record())]

            def listener(row: int, token: int) -> None:
                nonlocal drawn
                del row, token
                drawn += 1
                if drawn == min(_TOKENS, response) * phase.slots:
                    raise _Enough
                if drawn % phase.slots == 0:
                    stack.close()
                    records.append(stack.enter_context(self.device.record()))

            with contextlib.suppress(_Enough):
                self.worker.generate(
                    data,
                    seed=1,
                    drawing=Drawing(LengthParams(max_length=response), sampling),
                    listener=listener,
                )
        return records

    # Beside the step --------------------------------------------------------------------------

    def _hand_over(self, phase: HandOver) -> tuple[Amounts, dict[str, Kinds]]:
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


def share_of(model: TrainedModelConfig, phase: Train | Score, rows: Rows) -> SlicedDataDict:
    """A rank's share of a global batch, with the micro-batches that a front would form."""
    data: BatchedDataDict = BatchedDataDict(columns(rows))
    batching = _batching(model, phase)
    shards: Any = data.shard_by_batch_size(1, batch_size=rows.count, **batching)
    return shards[0][0] if batching else shards[0]


def _batching(model: TrainedModelConfig, phase: Train | Score) -> Any:
    return micro_batching(
        model, training=isinstance(phase, Train), rows_per_group=phase.rows.together
    )


def columns(rows: Rows) -> dict[str, Tensor]:
    """A batch of ``rows.count`` sequences of ``rows.length`` tokens; all but the first count.

    Columns are float32 ``[B, S]`` zeros but for ids and lengths, masks of ones, and those whose
    shape ``rows.trailing`` gives, of B, S and numbers.
    """
    count, length = rows.count, rows.length
    found: dict[str, Tensor] = {}
    for name in rows.columns:
        if name == "input_ids":
            found[name] = torch.zeros(count, length, dtype=torch.int64)
        elif name == "input_lengths":
            found[name] = torch.full((count,), length)
        elif name == "sample_mask":
            found[name] = torch.ones(count)
        elif name == "token_mask":
            found[name] = (torch.arange(length) > 0).float().expand(count, length).clone()
        else:
            found[name] = torch.zeros(count, length)
    for name, shape in rows.trailing.items():
        sizes = [{"B": count, "S": length}.get(str(size), size) for size in shape]
        kind = torch.int64 if name.endswith("_indices") else torch.float32
        found[name] = torch.zeros([int(size) for size in sizes], dtype=kind)
    return found
