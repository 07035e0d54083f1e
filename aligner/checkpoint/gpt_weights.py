"""Canonical weights into a megatron-core GPT model of any layout, and out of it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import (
    EMBEDDING,
    LORA_A,
    LORA_B,
    OUTPUT_LAYER,
    REWARD_HEAD,
    LazyTensors,
    Weights,
    canonical_name,
    check_names,
    check_shape,
    expected_shapes,
    merge,
    split,
    split_axis,
)
from aligner.checkpoint.nemo.weights import LazyWeights
from aligner.device import accelerator
from aligner.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")


def canonical_parameters(
    gpt: "GPTModel", architecture: GPTArchitecture
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this stage under their canonical (global) names.

    Layers are numbered by megatron-core's ``layer_number``. The last stage's copy of a tied
    embedding appears as ``output_layer.weight``, a reward head as ``rm_head.weight``, an adapter's
    matrices under the name of their linear (`LORA_A`, `LORA_B`).
    """
    for key, parameter in gpt.named_parameters():
        name = canonical_name(key)
        if name is None:
            continue
        match = _LAYER.match(name)
        if match is not None:
            layer = gpt.decoder.layers[int(match[1])]
            name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
            expert = _EXPERT.search(name)
            if expert is not None:  # numbered from 0 on every expert-parallel rank
                number = int(expert[1]) + layer.mlp.local_expert_indices[0]
                name = _EXPERT.sub(str(number), name)
        yield name, parameter


def model_parameters(
    gpt: "GPTModel", architecture: GPTArchitecture
) -> Iterator[tuple[str, Tensor]]:
    """`canonical_parameters` without those of adapters."""
    for name, parameter in canonical_parameters(gpt, architecture):
        if not name.endswith((LORA_A, LORA_B)):
            yield name, parameter


def merging(gpt: "GPTModel") -> Callable[[Tensor], Tensor]:
    """Function that turns a parameter into the weight it stands for, its adapter added.

    The result is detached, and shares the parameter's memory where there is no adapter.
    """
    adapters = {linear.weight: linear.lora for linear in gpt.modules() if hasattr(linear, "lora")}

    def merged(parameter: Tensor) -> Tensor:
        adapter = adapters.get(parameter)
        return parameter.detach() if adapter is None else adapter.merged_into(parameter)

    return merged


@torch.no_grad()
def load_weights(
    gpt: "GPTModel",
    weights: Weights,
    architecture: GPTArchitecture,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> None:
    """Copy this rank's share of canonical weights into the model.

    The pipeline stage is read off the model. Strict: tensors that the weights lack or have beyond
    the architecture, and shapes that differ, are a `CheckpointError`. A reward head is left to
    the caller; an output layer is not missed by a model that has none.
    """
    check_names(weights, architecture, "the checkpoint")
    shapes = expected_shapes(architecture)
    for name, parameter in model_parameters(gpt, architecture):
        if name in REWARD_HEAD:
            continue
        source = EMBEDDING if name == OUTPUT_LAYER and architecture.tie_embeddings else name
        if source not in weights:
            raise CheckpointError(f"the model has {name}, which the checkpoint lacks")
        # Experts may be whole where other layers are split; a share of a padded vocabulary may have
        # the whole one's shape.
        is_whole = shapes[source] == parameter.shape and source not in (EMBEDDING, OUTPUT_LAYER)
        place = (0, 1) if is_whole else (tp_rank, tp_size)
        if isinstance(weights, LazyWeights):
            tensor = weights.share(source, *place)
        else:
            tensor = weights[source]
            check_shape(source, tensor.shape, shapes[source])
            tensor = split(source, tensor, architecture, *place)
        check_shape(f"{name} on tensor rank {tp_rank}", tensor.shape, tuple(parameter.shape))
        parameter.copy_(tensor)


class GatheredTensors(LazyTensors):
    """Whole tensors on every rank, each joined when it is indexed and not kept afterwards.

    Creating and indexing it is collective: every rank of the model-parallel groups indexes the same
    names in the same order. A tensor is on the device, detached, and may share memory with a
    parameter.

    Args:
        parts: canonical names and this rank's parts, [out / tp, in] or [out, in / tp] as `split`
            makes them, of any dtype.
        names: canonical names of the whole tensors, in order; those that no rank has are left out.
        architecture: shape of the model.
        tp_group: ranks with the other tensor-parallel parts; None: the model is not split that way.
        pp_group: the same for pipeline stages.
        ep_group: the same for experts.
        whole_part: what is joined for a part, computed when the tensor is joined.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        names: Iterable[str],
        architecture: GPTArchitecture,
        *,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
        ep_group: dist.ProcessGroup | None = None,
        whole_part: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._architecture, self._whole_part = architecture, whole_part
        self._tp, self._pp, self._ep = (
            group if group is not None and group.size() > 1 else None
            for group in (tp_group, pp_group, ep_group)
        )
        self._parts = dict(parts)
        if architecture.tie_embeddings:  # the last stage's copy of the first stage's embedding
            self._parts.pop(OUTPUT_LAYER, None)
        held = {name: (part.shape, part.dtype) for name, part in self._parts.items()}
        stages = [held]
        if self._pp is not None:
            stages = [{}] * self._pp.size()
            dist.all_gather_object(stages, held, group=self._pp)
        self._places = {n: (stage, *held[n]) for stage, held in enumerate(stages) for n in held}
        super().__init__(name for name in names if self._local_name(name) in self._places)

    def __getitem__(self, name: str) -> Tensor:
        stage = self._stage_of(name)
        if self._pp is None:
            return self._joined(name)
        is_here = stage == self._pp.rank()
        tensor = self._joined(name).contiguous() if is_here else self._room_for(name)
        dist.broadcast(tensor, group=self._pp, group_src=stage)
        return tensor

    @torch.no_grad()
    def on_rank_zero(self) -> dict[str, Tensor]:
        """All tensors on the CPU of rank 0, an empty dict elsewhere; call it on every rank.

        Each tensor is joined by the ranks of one replica that have parts of it. The first rank of
        their pipeline stage sends it to rank 0. Other replicas do nothing, and no rank but 0 holds
        more than one tensor.
        """
        stage = 0 if self._pp is None else self._pp.rank()
        first, rank = None, None
        if dist.is_initialized():
            # Stages are blocks of consecutive ranks, in megatron-core's order of axes.
            stages = 1 if self._pp is None else self._pp.size()
            first, rank = stage * (dist.get_world_size() // stages), dist.get_rank()
        result: dict[str, Tensor] = {}
        for name in self:
            tensor: Tensor | None = None  # frees the last one before the next one is joined
            group = self._ep if self._is_shared_expert(name) else self._tp
            members = [rank] if group is None else dist.get_process_group_ranks(group)
            if first not in members:
                continue
            source = self._stage_of(name)
            if source == stage:
                tensor = self._joined(name)
                if stage > 0 and rank == first:
                    _send(tensor, self._pp)
            elif rank == 0:
                tensor = self._room_for(name)
                dist.recv(tensor, group=self._pp, group_src=source)
            if tensor is not None and rank in (0, None):
                result[name] = tensor.to("cpu", copy=True)
        return result

    def _stage_of(self, name: str) -> int:
        return self._places[self._local_name(name)][0]

    def _room_for(self, name: str) -> Tensor:
        """Return an uninitialised tensor for the whole one, which other stages hold."""
        _, shape, dtype = self._places[self._local_name(name)]
        if not self._is_shared_expert(name):
            count = 1 if self._tp is None else self._tp.size()
            parts = [torch.empty(shape, device="meta") for _ in range(count)]
            shape = merge(name, parts, self._architecture).shape
        return torch.empty(shape, dtype=dtype, device=accelerator.device())

    def _joined(self, name: str) -> Tensor:
        """Join a tensor of this stage out of the parts of the stage's ranks."""
        part = self._whole_part(self._parts[self._local_name(name)])
        if self._ep is not None and self._is_shared_expert(name):
            holder = self._expert(name) // self._experts_per_rank
            tensor = part.contiguous() if holder == self._ep.rank() else torch.empty_like(part)
            dist.broadcast(tensor, group=self._ep, group_src=holder)
            return tensor
        if self._tp is None or split_axis(name) is None or name in REWARD_HEAD:
            return merge(name, [part], self._architecture)  # the same on every rank
        parts = [torch.empty_like(part) for _ in range(self._tp.size())]
        dist.all_gather(parts, part.contiguous(), group=self._tp)
        return merge(name, parts, self._architecture)

    def _is_shared_expert(self, name: str) -> bool:
        return self._ep is not None and _EXPERT.search(name) is not None

    def _local_name(self, name: str) -> str:
        """Name of this rank's tensor in the place of ``name``, which may be of another expert."""
        if self._ep is None or not self._is_shared_expert(name):
            return name
        count = self._experts_per_rank
        return _EXPERT.sub(str(self._ep.rank() * count + self._expert(name) % count), name)

    def _expert(self, name: str) -> int:
        match = _EXPERT.search(name)
        assert match is not None
        return int(match[1])

    @property
    def _experts_per_rank(self) -> int:
        assert self._ep is not None
        assert self._architecture.num_moe_experts is not None
        return self._architecture.num_moe_experts // self._ep.size()


class GatheredWeights(GatheredTensors):
    """Canonical weights of a model as `GatheredTensors`, without a reward head.

    Adapters are merged into the weights, as they are when a tensor is indexed. ``groups``: see
    `GatheredTensors`.
    """

    def __init__(
        self,
        gpt: "GPTModel",
        architecture: GPTArchitecture,
        **groups: dist.ProcessGroup | None,
    ) -> None:
        parts = dict(model_parameters(gpt, architecture))
        names = expected_shapes(architecture)
        super().__init__(parts, names, architecture, **groups, whole_part=merging(gpt))


def gather_weights(
    gpt: "GPTModel", architecture: GPTArchitecture, **groups: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Canonical weights of the whole model, on the CPU of rank 0: the inverse of `load_weights`.

    Adapters are merged into the weights. A reward head that is a submodule comes along. Called on
    every rank; see `GatheredTensors.on_rank_zero`.
    """
    parts = dict(model_parameters(gpt, architecture))
    names = (*expected_shapes(architecture), *REWARD_HEAD)
    gathered = GatheredTensors(parts, names, architecture, **groups, whole_part=merging(gpt))
    return gathered.on_rank_zero()


def _send(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    dist.send(tensor.contiguous(), group=group, group_dst=0)
