"""Run state of a role on megatron-core, which can be loaded on any parallel layout.

Each process saves the slice of every parameter that its optimizer updates: float32 weights and
moments, with the parameter's canonical name and the index of its tensor-parallel part. With
adapters, frozen weights are not saved. To restore, a process reads the elements that it updates
from the memory-mapped files of all processes. It gathers other elements, as after a step.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
from aligner.checkpoint.adapters import adapter_shapes
from aligner.checkpoint.gpt_weights import GatheredWeights, canonical_parameters, load_weights
from aligner.config import LoraConfig
from aligner.errors import CheckpointError
from aligner.models.gpt.lora import RoleAdapters
from aligner.models.gpt.megatron.optimizer import RoleOptimizer
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.training_state import OwnedSlice
from aligner.parallel.groups import ParallelState

WEIGHT = "weight"
_MAX_PADDING = 128  # maximum padding of the vocabulary, in rows per tensor-parallel part


def _part(
    name: str, shape: torch.Size, shapes: Mapping[str, canonical.Shape], parallel: ParallelState
) -> tuple[int, int]:
    """Return the index of a parameter's part on this rank and the number of parts."""
    size = parallel.config.tensor
    # Heads, and experts with a separate tensor-parallel size, are unsplit next to split layers.
    is_head = name in canonical.REWARD_HEAD
    is_unsplit_expert = ".experts." in name and shapes[name] == tuple(shape)
    if size == 1 or canonical.split_axis(name) is None or is_head or is_unsplit_expert:
        return 0, 1
    return parallel.tp_rank, size


class _SavedRole:
    """Slices that all processes saved, by parameter name. Files are opened when needed."""

    def __init__(
        self, states: Sequence[Mapping[str, Any]], rank: int, architecture: GPTArchitecture
    ) -> None:
        self._architecture = architecture
        self._slices: dict[str, list[Mapping[str, Any]]] = {}
        # This rank's file first: if copies overlap, its bits are restored.
        ranks = sorted(range(len(states)), key=lambda index: (index != rank, index))
        self._unopened = (states[index]["slices"] for index in ranks)
        self.steps: int | None = states[ranks[0]]["steps"]
        self._open_next()

    @property
    def opened_names(self) -> Set[str]:
        """Names of the slices in the files that have been opened."""
        return self._slices.keys()

    def _open_next(self) -> bool:
        """Open the next file, and return False if all are open."""
        slices = next(self._unopened, None)
        if slices is None:
            return False
        for name, piece in slices.items():
            self._slices.setdefault(name, []).append(piece)
        return True

    def check_names(self, lora: LoraConfig | None) -> None:
        """Raise if the state belongs to another model, or to a model with other trained weights."""
        # Weights of another layout are spread over all files.
        while self._open_next():
            pass
        if any(name.endswith(canonical.LORA_A) for name in self._slices) != (lora is not None):
            raise CheckpointError(
                f"the run state was saved {'without' if lora else 'with'} adapters, but "
                f"model.peft.peft_scheme is now {'lora' if lora else 'null'}. Set it to "
                f"{'null' if lora else 'lora'}, or exp_manager.explicit_log_dir to a new directory"
            )
        # Without adapters, the state contains all weights of the architecture.
        if lora is None:
            canonical.check_names(
                self._slices,
                self._architecture,
                "the run state (a new exp_manager.explicit_log_dir starts a new run)",
            )
            return
        problems = canonical.misfits(
            set(self._slices),
            set(adapter_shapes(self._architecture, lora)),
            set(canonical.REWARD_HEAD),
        )
        if problems:
            raise CheckpointError(
                "adapters in the run state do not match model.peft.lora_tuning: "
                f"{problems}. Set this section as in the run that saved the state, or set "
                "exp_manager.explicit_log_dir to a new directory"
            )

    def moments(self, name: str) -> list[str]:
        """Return the names of a parameter's saved moments, empty before the first update."""
        return [kind for kind in self._pieces(name)[0]["tensors"] if kind != WEIGHT]

    def read(
        self, name: str, kind: str, part: tuple[int, int], shape: canonical.Shape, elements: range
    ) -> Tensor:
        """Return ``elements`` of the flattened ``part`` of a tensor, in this run's layout."""
        # The saved layout splits the tensor as this layout does.
        piece = self._pieces(name)[0]
        (rank, size), (_, count) = part, piece["part"]
        surplus = piece["shape"][0] * count - self._architecture.vocab_size
        is_padded = (
            name in (canonical.EMBEDDING, canonical.OUTPUT_LAYER)
            and 0 <= surplus < _MAX_PADDING * count
        )
        if count == size and (tuple(piece["shape"]) == shape or not is_padded):
            canonical.check_shape(f"{name} of the run state", piece["shape"], shape)
            return self._saved(name, kind, rank, elements)
        # Another split: locate the rows (or columns) of this part in the saved parts.
        axis, saved_shape = canonical.split_axis(name), list(piece["shape"])
        assert axis is not None, "an unsplit tensor always has part count 1"
        origin = canonical.origin_of_rows(
            name, saved_shape, count, self._architecture, tp_rank=rank, tp_size=size
        )
        new_shape = [origin.numel() if dim == axis else n for dim, n in enumerate(saved_shape)]
        canonical.check_shape(f"{name} of the run state", new_shape, shape)
        # Copy the rows that contain the elements, run by run, then cut the elements out.
        columns = math.prod(shape[1:])
        rows = range(elements.start // columns, -(-elements.stop // columns))
        result = torch.zeros(len(rows), columns, dtype=piece["tensors"][kind].dtype)
        saved_columns = math.prod(saved_shape[1:])
        along_rows = axis == 0
        selected = origin[rows.start : rows.stop] if along_rows else origin
        for first, index, start, length in canonical.runs_of_rows(selected, saved_shape[axis]):
            if along_rows:
                source = range(start * saved_columns, (start + length) * saved_columns)
                target = result[first : first + length]
            else:
                source = range(rows.start * saved_columns, rows.stop * saved_columns)
                target = result[:, first : first + length]
            block = self._saved(name, kind, index, source).view(len(target), saved_columns)
            target.copy_(block if along_rows else block[:, start : start + length])
        skipped = elements.start - rows.start * columns
        return result.view(-1)[skipped : skipped + len(elements)]

    def _pieces(self, name: str) -> list[Mapping[str, Any]]:
        while name not in self._slices:
            if not self._open_next():
                raise CheckpointError(
                    f"the run state does not contain {name} of the model. If "
                    "model.restore_from_path was changed, set exp_manager.explicit_log_dir to a "
                    "new directory"
                )
        return self._slices[name]

    def _saved(self, name: str, kind: str, index: int, elements: range) -> Tensor:
        """Return ``elements`` of saved part ``index``, as a view if one slice contains them all."""
        # Open files until one slice contains all elements.
        while True:
            pieces = [piece for piece in self._pieces(name) if piece["part"][0] == index]
            for piece in pieces:
                tensor, start = piece["tensors"][kind], piece["start"]
                if start <= elements.start and elements.stop <= start + tensor.numel():
                    return tensor[elements.start - start : elements.stop - start]
            if not self._open_next():
                break
        # Otherwise join the elements from several slices.
        if not pieces:
            raise _incomplete(f"part {index} of {name}")
        result = torch.empty(len(elements), dtype=pieces[0]["tensors"][kind].dtype)
        filled = elements.start
        for piece in sorted(pieces, key=lambda piece: piece["start"]):
            tensor, start = piece["tensors"][kind], piece["start"]
            stop = min(elements.stop, start + tensor.numel())
            if start <= filled < stop:
                source = tensor[filled - start : stop - start]
                result[filled - elements.start : stop - elements.start] = source
                filled = stop
        if filled != elements.stop:
            raise _incomplete(f"{kind} of {name} from element {filled} on")
        return result


def _incomplete(missing: str) -> CheckpointError:
    return CheckpointError(
        f"the run state does not contain {missing}. Delete it to resume from an earlier state"
    )


class RoleWeights(RoleModel):
    """Base class of `MegatronGPTModel`: loads and saves weights, and restores run states."""

    optimizer: RoleOptimizer | None
    adapters: RoleAdapters | None

    @property
    @abstractmethod
    def gpt(self) -> GPTModel:
        """Model of megatron-core without the data-parallel wrapper."""

    @cached_property
    def gathered_weights(self) -> GatheredWeights:
        """Canonical weights, with adapters merged. A weight is gathered when all ranks read it."""
        return GatheredWeights(
            self.gpt,
            self.architecture,
            tp_group=self.parallel.tp_group,
            pp_group=self.parallel.pp_group,
            ep_group=self.parallel.ep_group,
        )

    def run_state(self) -> dict[str, Any]:
        """Return weights and optimizer state of this process. Tensors are flat views, not copies.

        ``{"steps": number of optimizer steps or None, "slices": {name: slice}}``. A slice is
        ``{"part": (index, count) of the tensor-parallel part, "shape": shape of the part, "start":
        index of the first element in the flattened part, "tensors": {"weight", "exp_avg",
        "exp_avg_sq"}}``.
        """
        self.collect_weights()
        self._restore_gradients()
        owned, shapes = self._owned_slices(), self._shapes()
        is_replica = dist.get_rank(self.parallel.dp_cp_group) > 0
        slices: dict[str, Any] = {}
        for name, parameter in canonical_parameters(self.gpt):
            owned_slice = owned.get(parameter)
            if owned_slice is None or (
                name == canonical.OUTPUT_LAYER and self.architecture.tie_embeddings
            ):
                continue
            # Data-parallel replicas save only the slices that they update, and their experts, which
            # other ranks may lack.
            is_expert = not getattr(parameter, "allreduce", True)
            is_share = self._is_distributed and owned_slice.inner is not None
            if is_replica and not is_share and not is_expert:
                continue
            tensors = {WEIGHT: owned_slice.main.detach(), **owned_slice.moments()}
            slices[name] = {
                "part": _part(name, parameter.shape, shapes, self.parallel),
                "shape": list(parameter.shape),
                "start": owned_slice.start,
                "tensors": {kind: tensor.view(-1) for kind, tensor in tensors.items()},
            }
        return {"steps": None if self.optimizer is None else self.optimizer.steps, "slices": slices}

    @torch.no_grad()
    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this process's weights and optimizer state from all `run_state`, in rank order.

        Raises `CheckpointError` for a state of another model, or without one of the slices.
        """
        self._restore_gradients()  # with them, the optimizer's float32 weights
        optimizer, lora, tied = self.optimizer, self.settings.lora, self.architecture.tie_embeddings
        # Parameters that states contain, and the canonical tensor of those that this rank restores
        # (with a distributed optimizer: of which it updates a slice).
        trained = {
            name: parameter
            for name, parameter in canonical_parameters(self.gpt)
            if parameter.requires_grad or lora is None
        }
        owned, shapes = self._owned_slices(), self._shapes()
        sources = {
            name: canonical.EMBEDDING if name == canonical.OUTPUT_LAYER and tied else name
            for name, parameter in trained.items()
            if parameter in owned or not self._is_distributed
        }
        # If this rank's file does not fit, all files are opened: another layout, or another model.
        saved = _SavedRole(states, self.parallel.rank, self.architecture)
        missing = {*sources.values()} - saved.opened_names
        unexpected = saved.opened_names - ({*trained} & {*shapes, *canonical.REWARD_HEAD})
        if missing or unexpected:
            saved.check_names(lora)
        steps = None if optimizer is None else saved.steps
        # One parameter at a time: its weight, and the moments of the slice that is updated here.
        for name, source in sources.items():
            parameter = trained[name]
            part = _part(source, parameter.shape, shapes, self.parallel)
            shape, owned_slice = tuple(parameter.shape), owned.get(parameter)
            if owned_slice is None:
                parameter.copy_(
                    saved.read(source, WEIGHT, part, shape, range(math.prod(shape))).view(shape)
                )
                continue
            main, start = owned_slice.main, owned_slice.start
            elements = range(start, start + main.numel())
            weight = saved.read(source, WEIGHT, part, shape, elements)
            if not self._is_distributed:
                parameter.copy_(weight.view(shape))
            main.copy_(weight.view(main.shape))
            if owned_slice.inner is not None and steps is not None:  # an updated weight
                moments = {
                    kind: saved.read(source, kind, part, shape, elements).view(main.shape)
                    for kind in saved.moments(source)
                }
                owned_slice.set_moments(moments, steps)
        if optimizer is not None and self._is_distributed:
            optimizer.publish_weights()
        if optimizer is not None and steps is not None:
            optimizer.resume_at(steps)

    @property
    def _is_distributed(self) -> bool:
        """True if each data-parallel rank updates only a slice of the weights."""
        return self.optimizer is not None and self.optimizer.is_distributed

    def _shapes(self) -> dict[str, canonical.Shape]:
        """Return full shapes of the saved tensors by canonical name, except the head."""
        if self.settings.lora is None:
            return canonical.expected_shapes(self.architecture)
        return adapter_shapes(self.architecture, self.settings.lora)

    def _owned_slices(self) -> dict[Tensor, OwnedSlice]:
        """Return the slice that this process updates, or all of a frozen parameter."""
        # Weights that are frozen because the model has adapters are omitted.
        slices = () if self.optimizer is None else self.optimizer.owned_slices()
        owned: dict[Tensor, OwnedSlice] = {piece.parameter: piece for piece in slices}
        for parameter in self.gpt.parameters():
            is_updated = self.optimizer is not None and parameter.requires_grad
            if not is_updated and (parameter.requires_grad or self.settings.lora is None):
                owned[parameter] = OwnedSlice(parameter, 0, parameter, None)
        return owned

    def _restore_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.restore_gradients()

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
            self.optimizer.copy_model_weights()

    def fill_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """See `RoleModel.fill_adapters`."""
        assert self.adapters is not None
        self.adapters.fill(tensors.get)
        if self.optimizer is not None:
            self.optimizer.copy_model_weights()

    def gather_adapters(self) -> dict[str, Tensor]:
        """See `RoleModel.gather_adapters`."""
        assert self.adapters is not None
        return self.adapters.gather()

    def load_head(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Copy the reward head, weight [K, H] and bias [K], if model and checkpoint contain one.

        Raises `CheckpointError` if the shapes differ and ``strict`` is set.
        """
        head = getattr(self.gpt, "rm_head", None)
        if head is None:
            return
        for name in canonical.REWARD_HEAD:
            target = head.get_parameter(name.removeprefix("rm_head."))
            if name not in weights:
                continue
            if weights[name].shape == target.shape:
                target.data.copy_(weights[name])
            elif strict:
                raise CheckpointError(
                    f"{name} has shape {tuple(weights[name].shape)}, but this role needs "
                    f"{tuple(target.shape)}. Pass strict=False to start with a new head"
                )

    def whole_weights(self) -> dict[str, Tensor]:
        """See `RoleModel.whole_weights`."""
        self.collect_weights()
        return self.gathered_weights.on_rank_zero()
