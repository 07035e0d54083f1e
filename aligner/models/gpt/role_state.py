"""A role's weights and Adam moments, saved on one parallel layout and restored on any other.

Every process saves what it alone is responsible for: of each parameter the slice that its
optimizer updates, as float32 weights and moments, under the parameter's canonical name and with its
place in the tensor-parallel split. Nothing is gathered and nothing is copied; with the distributed
optimizer no element is saved twice over data-parallel ranks.

Restoring reads, one parameter at a time, the slices that the saving processes left (memory-mapped
files), joins them where the tensor-parallel split has changed, and copies this process's share.
Moments have their parameter's shape, so the rules that split and join weights hold for them too
(`aligner.checkpoint.canonical`). Weights in bfloat16 are the rounded float32 weights, which is how
the optimizer makes them.

The state is exact. Whether what follows repeats to the bit is the device's matter: on a CPU it
does; on a GPU gradients are added in varying order unless ``trainer.deterministic`` is set.

What is frozen beside adapters is no part of it: the model's file has it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapter_shapes
from aligner.checkpoint.canonical import (
    EMBEDDING,
    LORA_A,
    OUTPUT_LAYER,
    REWARD_HEAD,
    Shape,
    check_names,
    check_shape,
    expected_shapes,
    merge,
    misfits,
    split,
    split_axis,
)
from aligner.checkpoint.gpt_weights import canonical_parameters
from aligner.config import LoraConfig
from aligner.distributed.parallel import ParallelState
from aligner.errors import CheckpointError
from aligner.models.gpt.optimizer import OwnedSlice, RoleOptimizer

WEIGHT = "weight"


@dataclass(frozen=True)
class TensorPart:
    """Part ``index`` of ``count`` of a tensor that tensor parallelism splits; whole: 0 of 1."""

    index: int
    count: int


def role_state(
    gpt: GPTModel,
    architecture: GPTArchitecture,
    parallel: ParallelState,
    optimizer: RoleOptimizer | None,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """What this process has to save; tensors are flat views of its memory.

    ``{"steps": optimizer steps or None, "slices": {name: {"part": (index, count), "shape", "start",
    "tensors": {"weight", "exp_avg", "exp_avg_sq"}}}}``: the elements from ``start`` on of part
    ``index``, which has ``shape`` and is flattened.
    """
    owned = _owned_slices(gpt, optimizer)
    is_replica = dist.get_rank(parallel.dp_cp_group) > 0
    is_shared_out = optimizer is not None and optimizer.is_distributed
    shapes = _shapes(architecture, lora)
    slices: dict[str, Any] = {}
    for name, parameter in canonical_parameters(gpt, architecture):
        mine = owned.get(parameter)
        if mine is None or (name == OUTPUT_LAYER and architecture.tie_embeddings):
            continue
        is_expert = not getattr(parameter, "allreduce", True)  # others may be at home elsewhere
        if is_replica and not is_shared_out and not is_expert:
            continue
        tensors = {WEIGHT: mine.main.detach(), **mine.moments()}
        slices[name] = {
            "part": astuple(_part(name, parameter.shape, shapes, parallel)),
            "shape": list(parameter.shape),
            "start": mine.start,
            "tensors": {kind: tensor.view(-1) for kind, tensor in tensors.items()},
        }
    return {"steps": optimizer.steps if optimizer is not None else None, "slices": slices}


@torch.no_grad()
def load_role_state(
    gpt: GPTModel,
    architecture: GPTArchitecture,
    parallel: ParallelState,
    optimizer: RoleOptimizer | None,
    lora: LoraConfig | None,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore this process's share from what all processes of the saving run gave, in rank order.

    On the layout that saved, every bit comes back. On another one only the padding rows of the
    vocabulary, which nothing reads, start from zero. `CheckpointError` where the state is not this
    model's or a slice is missing.
    """
    saved = _SavedRole(states, parallel.rank, architecture, lora)
    owned = _owned_slices(gpt, optimizer)
    shapes = _shapes(architecture, lora)
    for name, parameter in canonical_parameters(gpt, architecture):
        if not parameter.requires_grad:
            continue
        source = EMBEDDING if name == OUTPUT_LAYER and architecture.tie_embeddings else name
        part = _part(source, parameter.shape, shapes, parallel)
        weight = saved.read(source, WEIGHT, part, tuple(parameter.shape))
        parameter.copy_(weight)
        mine = owned.get(parameter)
        if mine is None:
            continue
        mine.main.copy_(mine.of(weight))
        if optimizer is not None and saved.steps is not None:
            kinds = saved.moments(source)
            moments = {
                kind: mine.of(saved.read(source, kind, part, tuple(parameter.shape)))
                for kind in kinds
            }
            mine.set_moments(moments, saved.steps)
    if optimizer is not None and saved.steps is not None:
        optimizer.resume_at(saved.steps)


def _shapes(architecture: GPTArchitecture, lora: LoraConfig | None) -> dict[str, Shape]:
    """Whole shapes of the tensors that a state holds, a head apart."""
    return expected_shapes(architecture) if lora is None else adapter_shapes(architecture, lora)


def _owned_slices(gpt: GPTModel, optimizer: RoleOptimizer | None) -> dict[Tensor, OwnedSlice]:
    """By parameter, the slice this process updates; without an optimizer, all of each."""
    if optimizer is not None:
        return {owned.parameter: owned for owned in optimizer.owned_slices()}
    learning = (parameter for parameter in gpt.parameters() if parameter.requires_grad)
    return {parameter: OwnedSlice(parameter, 0, parameter, None) for parameter in learning}


def _part(
    name: str, shape: torch.Size, shapes: Mapping[str, Shape], parallel: ParallelState
) -> TensorPart:
    """Which part of the tensor a parameter of this process is."""
    size = parallel.config.tensor
    # Heads, and experts that have their own tensor-parallel size, are whole beside split layers.
    is_head = name in REWARD_HEAD
    is_whole_expert = ".experts." in name and shapes[name] == tuple(shape)
    if size == 1 or split_axis(name) is None or is_head or is_whole_expert:
        return TensorPart(0, 1)
    return TensorPart(parallel.tp_rank, size)


class _SavedRole:
    """The slices of all saving processes, by name."""

    def __init__(
        self,
        states: Sequence[Mapping[str, Any]],
        rank: int,
        architecture: GPTArchitecture,
        lora: LoraConfig | None,
    ) -> None:
        self._architecture = architecture
        self._slices: dict[str, list[Mapping[str, Any]]] = {}
        # The last slice wins where copies overlap: one's own, so that not a bit of it changes.
        for number in sorted(range(len(states)), key=lambda number: (number == rank, number)):
            for name, piece in states[number]["slices"].items():
                self._slices.setdefault(name, []).append(piece)
        self.steps: int | None = states[0]["steps"]
        self._check_names(lora)

    def _check_names(self, lora: LoraConfig | None) -> None:
        """Refuse the state of another model, or of one that learned by other weights."""
        if any(name.endswith(LORA_A) for name in self._slices) != (lora is not None):
            raise CheckpointError(
                "the run state was saved "
                f"{'without' if lora else 'with'} adapters, and model.peft.peft_scheme is now "
                f"{'lora' if lora else 'null'}; set it back, or use another "
                "exp_manager.explicit_log_dir"
            )
        if lora is None:
            check_names(
                self._slices,
                self._architecture,
                "the run state (another exp_manager.explicit_log_dir starts a new run)",
            )
            return
        problems = misfits(
            set(self._slices), set(adapter_shapes(self._architecture, lora)), set(REWARD_HEAD)
        )
        if problems:
            raise CheckpointError(
                f"adapters in the run state are not those of model.peft.lora_tuning: {problems}; "
                "set it back, or use another exp_manager.explicit_log_dir"
            )

    def moments(self, name: str) -> list[str]:
        """Kinds of optimizer state there are of a parameter; none before the first update."""
        return [kind for kind in self._pieces(name)[0]["tensors"] if kind != WEIGHT]

    def read(self, name: str, kind: str, part: TensorPart, shape: Shape) -> Tensor:
        """One part of a tensor, split as ``part`` says; ``shape`` is what it must have."""
        _, count = self._pieces(name)[0]["part"]
        if count == part.count:
            tensor = self._saved_part(name, kind, part.index)
        else:
            parts = [self._saved_part(name, kind, index) for index in range(count)]
            whole = merge(name, parts, self._architecture)
            tensor = split(name, whole, self._architecture, part.index, part.count)
        check_shape(f"{name} of the run state", tensor.shape, shape)
        return tensor

    def _pieces(self, name: str) -> list[Mapping[str, Any]]:
        if name not in self._slices:
            raise CheckpointError(
                f"the model has {name}, which the run state lacks; was model.restore_from_path "
                "changed? Use another exp_manager.explicit_log_dir"
            )
        return self._slices[name]

    def _saved_part(self, name: str, kind: str, index: int) -> Tensor:
        """Part ``index`` as it was split when it was saved, out of its slices."""
        pieces = [piece for piece in self._pieces(name) if piece["part"][0] == index]
        if not pieces:
            raise _incomplete(f"part {index} of {name}")
        shape = tuple(pieces[-1]["shape"])
        tensor = pieces[-1]["tensors"][kind]
        if tensor.numel() == math.prod(shape):
            return tensor.view(shape)
        result = torch.empty(math.prod(shape), dtype=tensor.dtype)
        filled = 0
        for piece in sorted(pieces, key=lambda piece: piece["start"]):
            tensor, start = piece["tensors"][kind], piece["start"]
            if start > filled:
                break
            result[start : start + tensor.numel()] = tensor
            filled = max(filled, start + tensor.numel())
        if filled != result.numel():
            raise _incomplete(f"{kind} of {name} from element {filled} on")
        return result.view(shape)


def _incomplete(what: str) -> CheckpointError:
    return CheckpointError(f"the run state lacks {what}; resume from an earlier state")
