"""A role's weights and Adam moments, saved on one parallel layout and restored on any other.

Every process saves what only it is responsible for: of each parameter the slice that its
optimizer updates, as float32 weights and moments, under the parameter's canonical name and with its
place in the tensor-parallel split. Nothing is gathered and nothing is copied; with the distributed
optimizer no element is saved twice over data-parallel ranks.

Restoring reads, one parameter at a time, the elements that this process updates, wherever the
saving processes left them (memory-mapped files, its own first). Where the tensor-parallel split has
changed, the rules that split and join weights (`aligner.checkpoint.canonical`) give their places;
moments have their parameter's shape, so they hold for them too. The weights that other
data-parallel ranks update come from them, as after a step; in bfloat16 they are the rounded float32
weights, which is how the optimizer makes them.

The state is exact. Whether what follows repeats to the bit is the device's matter: on a CPU it
does; on a GPU gradients are added in varying order unless ``trainer.deterministic`` is set.

What is frozen beside adapters is no part of it: the model's file has it. `RoleWeights` also takes
whole weights, adapters and the head in and out.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from pathlib import Path
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
    misfits,
    origin_of_rows,
    runs_of_rows,
    split_axis,
)
from aligner.checkpoint.gpt_weights import canonical_parameters, gather_weights, load_weights
from aligner.config import LoraConfig
from aligner.errors import CheckpointError
from aligner.models.gpt.lora import RoleAdapters
from aligner.models.gpt.megatron.optimizer import RoleOptimizer
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.optimizer_step import OwnedSlice
from aligner.parallel.groups import ParallelState

WEIGHT = "weight"
_MOST_PADDING = 128  # rows of a vocabulary, per part; a `.nemo` may say fewer


@dataclass(frozen=True)
class TensorPart:
    """Part ``index`` of ``count`` of a tensor that tensor parallelism splits; whole: 0 of 1."""

    index: int
    count: int


def _part(
    name: str, shape: torch.Size, shapes: Mapping[str, Shape], parallel: ParallelState
) -> TensorPart:
    """Part of the tensor that a parameter of this process is."""
    size = parallel.config.tensor
    # Heads, and experts that have their own tensor-parallel size, are whole beside split layers.
    is_head = name in REWARD_HEAD
    is_whole_expert = ".experts." in name and shapes[name] == tuple(shape)
    if size == 1 or split_axis(name) is None or is_head or is_whole_expert:
        return TensorPart(0, 1)
    return TensorPart(parallel.tp_rank, size)


class _SavedRole:
    """The slices of all saving processes, by name; files are opened as they are needed."""

    def __init__(
        self,
        states: Sequence[Mapping[str, Any]],
        rank: int,
        architecture: GPTArchitecture,
    ) -> None:
        self._architecture = architecture
        self._slices: dict[str, list[Mapping[str, Any]]] = {}
        # One's own first: where copies overlap, so that not a bit of it changes.
        ranks = sorted(range(len(states)), key=lambda number: (number != rank, number))
        self._unopened = (states[number]["slices"] for number in ranks)
        self.steps: int | None = states[ranks[0]]["steps"]
        self._open_next()

    @property
    def opened_names(self) -> Set[str]:
        """Names of the slices in the files that have been opened."""
        return self._slices.keys()

    def _open_next(self) -> bool:
        """Look into one more file; False: there is none left."""
        slices = next(self._unopened, None)
        if slices is None:
            return False
        for name, piece in slices.items():
            self._slices.setdefault(name, []).append(piece)
        return True

    def check_names(self, lora: LoraConfig | None) -> None:
        """Refuse the state of another model, or of one that learned by other weights."""
        while self._open_next():
            pass
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

    def read(
        self, name: str, kind: str, part: TensorPart, shape: Shape, place: range | None = None
    ) -> Tensor:
        """Elements ``place`` (default all) of one part of a tensor, flat.

        ``part``: how it is split now; ``shape``: that the part must have.
        """
        place = range(math.prod(shape)) if place is None else place
        piece = self._pieces(name)[0]
        _, count = piece["part"]
        surplus = piece["shape"][0] * count - self._architecture.vocab_size
        is_padded = name in (EMBEDDING, OUTPUT_LAYER) and 0 <= surplus < _MOST_PADDING * count
        if count == part.count and (tuple(piece["shape"]) == shape or not is_padded):
            check_shape(f"{name} of the run state", piece["shape"], shape)
            return self._saved(name, kind, part.index, place)
        axis, before = split_axis(name), list(piece["shape"])
        assert axis is not None, "what is not split is one part of one"
        origin = origin_of_rows(
            name, before, count, self._architecture, tp_rank=part.index, tp_size=part.count
        )
        found = [origin.numel() if dim == axis else size for dim, size in enumerate(before)]
        check_shape(f"{name} of the run state", found, shape)
        columns = math.prod(shape[1:])
        rows = range(place.start // columns, -(-place.stop // columns))
        result = torch.zeros(len(rows), columns, dtype=piece["tensors"][kind].dtype)
        wide = math.prod(before[1:])
        along_rows = axis == 0
        wanted = origin[rows.start : rows.stop] if along_rows else origin
        for first, index, start, length in runs_of_rows(wanted, before[axis]):
            if along_rows:
                source = range(start * wide, (start + length) * wide)
                target = result[first : first + length]
            else:
                source = range(rows.start * wide, rows.stop * wide)
                target = result[:, first : first + length]
            block = self._saved(name, kind, index, source).view(len(target), wide)
            target.copy_(block if along_rows else block[:, start : start + length])
        skipped = place.start - rows.start * columns
        return result.view(-1)[skipped : skipped + len(place)]

    def _pieces(self, name: str) -> list[Mapping[str, Any]]:
        while name not in self._slices:
            if not self._open_next():
                raise CheckpointError(
                    f"the model has {name}, which the run state lacks; was "
                    "model.restore_from_path changed? Use another exp_manager.explicit_log_dir"
                )
        return self._slices[name]

    def _saved(self, name: str, kind: str, index: int, place: range) -> Tensor:
        """Elements ``place`` of part ``index``, as it was split when it was saved.

        Where one slice has them all, that is a view of its file.
        """
        while True:
            pieces = [piece for piece in self._pieces(name) if piece["part"][0] == index]
            for piece in pieces:
                tensor, start = piece["tensors"][kind], piece["start"]
                if start <= place.start and place.stop <= start + tensor.numel():
                    return tensor[place.start - start : place.stop - start]
            if not self._open_next():
                break
        if not pieces:
            raise _incomplete(f"part {index} of {name}")
        result = torch.empty(len(place), dtype=pieces[0]["tensors"][kind].dtype)
        filled = place.start
        for piece in sorted(pieces, key=lambda piece: piece["start"]):
            tensor, start = piece["tensors"][kind], piece["start"]
            stop = min(place.stop, start + tensor.numel())
            if start <= filled < stop:
                result[filled - place.start : stop - place.start] = tensor[
                    filled - start : stop - start
                ]
                filled = stop
        if filled != place.stop:
            raise _incomplete(f"{kind} of {name} from element {filled} on")
        return result


def _incomplete(what: str) -> CheckpointError:
    return CheckpointError(f"the run state lacks {what}; resume from an earlier state")


class RoleWeights(RoleModel):
    """Weights of `MegatronGPTModel`, which has the attributes declared here."""

    optimizer: RoleOptimizer | None
    adapters: RoleAdapters | None

    @property
    def gpt(self) -> GPTModel:
        """The megatron-core model, without the data-parallel wrapper."""
        return self.model.module if self.optimizer is not None else self.model

    def collect_weights(self) -> None:
        """See `RoleOptimizer.collect_weights`."""
        if self.optimizer is not None:
            self.optimizer.collect_weights()

    def run_state(self) -> dict[str, Any]:
        """State that this process has to save; tensors are flat views of its memory.

        ``{"steps": optimizer steps or None, "slices": {name: {"part": (index, count), "shape",
        "start", "tensors": {"weight", "exp_avg", "exp_avg_sq"}}}}``: the elements from ``start`` on
        of part ``index``, which has ``shape`` and is flattened.
        """
        self.collect_weights()
        self._bring_gradients()
        owned, shapes = self._owned_slices(), self._shapes()
        is_replica = dist.get_rank(self.parallel.dp_cp_group) > 0
        slices: dict[str, Any] = {}
        for name, parameter in canonical_parameters(self.gpt, self.architecture):
            mine = owned.get(parameter)
            if mine is None or (name == OUTPUT_LAYER and self.architecture.tie_embeddings):
                continue
            is_expert = not getattr(parameter, "allreduce", True)  # others may be at home elsewhere
            is_share = self._is_shared_out and mine.inner is not None
            if is_replica and not is_share and not is_expert:
                continue
            tensors = {WEIGHT: mine.main.detach(), **mine.moments()}
            slices[name] = {
                "part": astuple(_part(name, parameter.shape, shapes, self.parallel)),
                "shape": list(parameter.shape),
                "start": mine.start,
                "tensors": {kind: tensor.view(-1) for kind, tensor in tensors.items()},
            }
        return {"steps": None if self.optimizer is None else self.optimizer.steps, "slices": slices}

    @torch.no_grad()
    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this process's share from what all processes of the saving run gave.

        ``states`` are in rank order. On the layout that saved, every bit comes back. On another one
        only the padding rows of the vocabulary, which nothing reads, start from zero.
        `CheckpointError` where the state is not this model's or a slice is missing.
        """
        self._bring_gradients()
        optimizer, lora, tied = self.optimizer, self.settings.lora, self.architecture.tie_embeddings
        learning = {
            name: parameter
            for name, parameter in canonical_parameters(self.gpt, self.architecture)
            if parameter.requires_grad or lora is None
        }
        owned, shapes = self._owned_slices(), self._shapes()
        needed = {
            name: EMBEDDING if name == OUTPUT_LAYER and tied else name
            for name, parameter in learning.items()
            if parameter in owned or not self._is_shared_out
        }
        saved = _SavedRole(states, self.parallel.rank, self.architecture)
        if not {*needed.values()} <= saved.opened_names <= {*learning} & {*shapes, *REWARD_HEAD}:
            saved.check_names(lora)  # of another layout, or of another model
        learns = optimizer is not None and saved.steps is not None
        for name, source in needed.items():
            parameter = learning[name]
            part = _part(source, parameter.shape, shapes, self.parallel)
            shape, mine = tuple(parameter.shape), owned.get(parameter)
            place = range(math.prod(shape))
            kinds = [WEIGHT]
            if mine is not None:
                place = range(mine.start, mine.start + mine.main.numel())
                kinds += saved.moments(source) if learns and mine.inner is not None else []
            found = {kind: saved.read(source, kind, part, shape, place) for kind in kinds}
            weight = found.pop(WEIGHT)
            if not self._is_shared_out:
                parameter.copy_(weight.view(shape))
            if mine is not None:
                mine.main.copy_(weight.view(mine.main.shape))
            if mine is not None and mine.inner is not None and saved.steps is not None and learns:
                moments = {kind: moment.view(mine.main.shape) for kind, moment in found.items()}
                mine.set_moments(moments, saved.steps)
        if optimizer is not None and self._is_shared_out:
            optimizer.hand_out_weights()
        if optimizer is not None and saved.steps is not None:
            optimizer.resume_at(saved.steps)

    @property
    def _is_shared_out(self) -> bool:
        """True if data-parallel ranks update a share of the weights each."""
        return self.optimizer is not None and self.optimizer.is_distributed

    def _shapes(self) -> dict[str, Shape]:
        """Whole shapes of the tensors that a state holds, a head apart."""
        if self.settings.lora is None:
            return expected_shapes(self.architecture)
        return adapter_shapes(self.architecture, self.settings.lora)

    def _owned_slices(self) -> dict[Tensor, OwnedSlice]:
        """Slice of each parameter that this process updates, and all of what nothing updates.

        Without an optimizer nothing is updated. Weights frozen beside adapters are left out.
        """
        slices = () if self.optimizer is None else self.optimizer.owned_slices()
        updated: dict[Tensor, OwnedSlice] = {each.parameter: each for each in slices}
        for parameter in self.gpt.parameters():
            is_updated = self.optimizer is not None and parameter.requires_grad
            if not is_updated and (parameter.requires_grad or self.settings.lora is None):
                updated[parameter] = OwnedSlice(parameter, 0, parameter, None)
        return updated

    def _bring_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.bring_gradients()

    def load_whole_weights(self, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """See `RoleModel.load_whole_weights`."""
        load_weights(
            self.gpt,
            weights,
            self.architecture,
            tp_rank=self.parallel.tp_rank,
            tp_size=self.settings.parallel.tensor,
        )
        self.load_head(weights, strict)
        if self.optimizer is not None:
            self.optimizer.take_over_weights()

    def load_adapters(self, path: str | Path) -> None:
        """See `RoleModel.load_adapters`."""
        assert self.adapters is not None
        self.adapters.load(path)
        if self.optimizer is not None:
            self.optimizer.take_over_weights()

    def save_adapters(self, path: str | Path) -> None:
        """See `RoleModel.save_adapters`."""
        assert self.adapters is not None
        self.adapters.save(path, self.nemo_keys())

    def load_head(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Copy the reward head, weight [K, H] and bias [K], where both the model and the checkpoint
        have one.

        Raises:
            CheckpointError: the shapes differ and ``strict`` is set.
        """
        head = getattr(self.gpt, "rm_head", None)
        if head is None:
            return
        for name in REWARD_HEAD:
            target = head.get_parameter(name.removeprefix("rm_head."))
            if name not in weights:
                continue
            if weights[name].shape == target.shape:
                target.data.copy_(weights[name])
            elif strict:
                raise CheckpointError(
                    f"{name} has shape {tuple(weights[name].shape)}, this role's is "
                    f"{tuple(target.shape)}; pass strict=False to start with a fresh head"
                )

    def whole_weights(self) -> dict[str, Tensor]:
        """See `RoleModel.whole_weights`."""
        self.collect_weights()
        return gather_weights(
            self.gpt,
            self.architecture,
            tp_group=self.parallel.tp_group,
            pp_group=self.parallel.pp_group,
            ep_group=self.parallel.ep_group,
        )
