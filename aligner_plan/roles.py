"""Work of the models of a run in one step of its algorithm."""

import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.config import (
    BaseRunConfig,
    CriticConfig,
    EngineResources,
    ParallelConfig,
    TrainedModelConfig,
)
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.sharding import MicroBatching
from aligner.distributed.workers import micro_batching


@dataclass(frozen=True)
class Column:
    """A tensor column of a batch: dtype, and sizes after the batch axis. None: sequence length."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype

    def zeros(self, rows: int, length: int) -> Tensor:
        """Return zeros ``[rows, ...]``."""
        sizes = (length if size is None else size for size in self.sizes)
        return torch.zeros(rows, *sizes, dtype=self.dtype)


@dataclass(frozen=True)
class Phase:
    """Calls of one method of a role's workers in a step, on sequences of the greatest length.

    Args:
        name: name of the phase.
        method: method of the worker. It is empty for `refit` and `save`, which call no method.
        rows: rows of the whole batch, in each of ``times`` parts.
        times: number of parts.
        length: tokens of a row. For generation, tokens of the prompt.
        columns: columns of the batch.
        options: other arguments of the method.
        enter: method that is called first.
        response: sampled tokens.
        buffer_bytes: bytes of the buffer in which ``refit`` transfers one group of tensors.
    """

    name: str
    method: str = ""
    rows: int = 0
    times: int = 1
    length: int = 0
    columns: Mapping[str, Column] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    enter: str = ""
    response: int = 0
    buffer_bytes: int = 0

    @property
    def is_update(self) -> bool:
        """True if the role learns."""
        return self.method == "train"

    @property
    def rows_per_group(self) -> int:
        """Adjacent rows that must be in one micro-batch."""
        loss = self.options.get("loss_fn")
        return 1 if loss is None else int(loss.rows_per_group)

    def batch(self, rows: int) -> BatchedDataDict:
        """Return ``rows`` sequences of zeros, in which all tokens but the first count."""
        data = {name: column.zeros(rows, self.length) for name, column in self.columns.items()}
        data["input_lengths"].fill_(self.length)
        if "sample_mask" in data:
            data["sample_mask"].fill_(1)
        if "token_mask" in data:
            data["token_mask"][:, 1:] = 1
        return BatchedDataDict(data)


@dataclass(frozen=True)
class PlannedRole:
    """A model of the run: arguments of its workers, and its phases in the order of a step.

    ``options``: arguments of ``worker``, a dotted path, without layout and tokenizer.
    """

    name: str
    architecture: GPTArchitecture
    worker: str
    options: Mapping[str, Any]
    world: int  # processes
    cards: str  # roles with the same name of cards share the cards
    phases: tuple[Phase, ...]
    engine: EngineResources | None = None  # if the role represents rollout engines

    @property
    def section(self) -> TrainedModelConfig | CriticConfig:
        """The role's section of the configuration."""
        return self.options["config"]

    @property
    def model(self) -> TrainedModelConfig:
        """The section with layout and token budgets."""
        return self.options.get("model") or self.options["config"]

    @property
    def parallel(self) -> ParallelConfig:
        """Parallel layout of the role."""
        return self.model.parallel

    @property
    def learns(self) -> bool:
        """True if the role has an optimizer."""
        return bool(self.options.get("init_optimizer", True))

    @property
    def is_dtensor(self) -> bool:
        """True if the worker belongs to the DTensor backend."""
        return bool(pkgutil.resolve_name(self.worker).model_class().backend == "dtensor")

    def rows(self, phase: Phase) -> int:
        """Return the rows of a data-parallel rank in each part of a phase."""
        return -(-phase.rows // self.parallel.data_size(self.world))

    def slots(self, phase: Phase) -> int:
        """Return the responses that a data-parallel rank samples at a time."""
        return min(self.model.rollout.rollout_micro_batch_size, self.rows(phase))

    def batching(self, phase: Phase) -> MicroBatching:
        """Return the options that form micro-batches of a phase. Empty: a fixed number of rows."""
        return micro_batching(
            self.model,
            training=phase.is_update,
            micro_batch_size=phase.options.get("micro_batch_size"),
            rows_per_group=phase.rows_per_group,
        )

    def micro_batch_size(self, phase: Phase) -> int:
        """Return the rows of a micro-batch on a data-parallel rank."""
        section = self.section
        if batching := self.batching(phase):
            options: Any = next(iter(batching.values()))
            multiple = options.get("sequence_length_round") or options.get(
                "sequence_length_pad_multiple", 1
            )
            length = math.ceil(phase.length / multiple) * multiple
            rows = options["max_tokens_per_microbatch"] // length
            size = rows // phase.rows_per_group * phase.rows_per_group
        elif phase.is_update:
            size = phase.options["mbs"]
        else:
            limits = section if isinstance(section, CriticConfig) else section.rollout
            size = phase.options.get("micro_batch_size") or limits.forward_micro_batch_size
        return max(phase.rows_per_group, min(size, self.rows(phase)))


@dataclass(frozen=True)
class PlannedRun:
    """The roles of a run, and the order of a step: (role, phase)."""

    config: BaseRunConfig
    roles: dict[str, PlannedRole]
    step: tuple[tuple[str, str], ...]
