"""Canonical weights into a megatron-core GPT model of any layout, and out of it."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

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
    SharedWeights,
    Weights,
    canonical_name,
    check_names,
    check_shape,
    expected_shapes,
    merge,
    split,
)
from aligner.device import accelerator
from aligner.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^(.*\.local_experts\.)(\d+)(\..*)$")


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
            name = _global_expert(name, layer, architecture)
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


def _global_expert(name: str, layer: torch.nn.Module, architecture: GPTArchitecture) -> str:
    """Experts are numbered from 0 on every expert-parallel rank."""
    match = _EXPERT.match(name)
    if match is None or architecture.num_moe_experts is None:
        return name
    first = layer.mlp.local_expert_indices[0]
    return f"{match[1]}{int(match[2]) + first}{match[3]}"


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
        if isinstance(weights, SharedWeights):
            tensor = weights.share(source, *place)
        else:
            tensor = weights[source]
            check_shape(source, tensor.shape, shapes[source])
            tensor = split(source, tensor, architecture, *place)
        check_shape(f"{name} on tensor rank {tp_rank}", tensor.shape, tuple(parameter.shape))
        parameter.copy_(tensor)


@torch.no_grad()
def gather_weights(
    gpt: "GPTModel",
    architecture: GPTArchitecture,
    *,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Canonical weights of the whole model, on the CPU of rank 0: the inverse of `load_weights`.

    Adapters are merged into the weights. A reward head that is a submodule comes along. Experts
    that are shared out over ``ep_group`` are whole where they are. Called on every rank; see
    `gather_tensors`.
    """
    merged = merging(gpt)
    weights = (
        (name, merged(parameter))
        for name, parameter in model_parameters(gpt, architecture)
        if not (name == OUTPUT_LAYER and architecture.tie_embeddings)
    )
    names = (*expected_shapes(architecture), *REWARD_HEAD)
    groups = {"tp_group": tp_group, "pp_group": pp_group, "ep_group": ep_group}
    return gather_tensors(weights, names, architecture, **groups)


@torch.no_grad()
def gather_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    names: Iterable[str],
    architecture: GPTArchitecture,
    *,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Each rank's shares of ``tensors`` joined, in the order of ``names``, on rank 0's CPU.

    ``tensors``: canonical names and this rank's parts, [out / tp, in] or [out, in / tp] as `split`
    makes them, of any dtype.

    Called on every rank, with its groups (None: not split that way); an empty dict elsewhere. The
    first rank of each pipeline stage joins the stage's tensors, with the ranks of its own
    tensor-parallel and expert-parallel groups; the first stage's keeps them, the others send each
    as soon as it is whole. Other replicas do nothing, and no rank but 0 holds more than a tensor.
    """
    first = _first_rank_of_stage(pp_group)
    own: dict[str, Tensor] = {}
    if not any(_holds(group, first) for group in (tp_group, ep_group)):
        return own
    stage = 0 if pp_group is None else pp_group.rank()
    joins = first is None or dist.get_rank() == first
    for name, tensor in tensors:
        is_shared_out = ep_group is not None and ep_group.size() > 1 and ".local_experts." in name
        group = ep_group if is_shared_out else tp_group
        if not _holds(group, first):
            continue
        parts = _all_gather(tensor, group)
        if not joins:
            continue
        whole = (
            dict(zip(_siblings(name, parts, architecture), parts, strict=True))
            if is_shared_out
            else {name: merge(name, parts, architecture)}
        )
        for key, value in whole.items():
            if stage == 0:
                own[key] = value.to("cpu", copy=True)
            else:
                assert pp_group is not None
                _send(key, value, pp_group)
    if joins and pp_group is not None:
        if stage > 0:
            _send_end(pp_group)
            return {}
        for sender in range(1, pp_group.size()):
            own.update(_received(sender, pp_group))
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(own.items(), key=lambda item: order[item[0]]))


def _first_rank_of_stage(pp_group: dist.ProcessGroup | None) -> int | None:
    """Rank that joins this stage's tensors; None: there is one process.

    Pipeline stages are blocks of consecutive ranks, in megatron-core's order of axes.
    """
    if not dist.is_initialized():
        return None
    stages, stage = (1, 0) if pp_group is None else (pp_group.size(), pp_group.rank())
    return stage * (dist.get_world_size() // stages)


def _holds(group: dist.ProcessGroup | None, rank: int | None) -> bool:
    """Return whether ``rank`` is in ``group``; without a group, whether it is this process."""
    if rank is None:
        return True
    members = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return rank in members


def _send(name: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Give a tensor to the first stage."""
    first = dist.get_global_rank(group, 0)
    dist.send_object_list([(name, tensor.shape, tensor.dtype)], dst=first, group=group)
    dist.send(tensor.contiguous(), dst=first, group=group)


def _send_end(group: dist.ProcessGroup) -> None:
    dist.send_object_list([None], dst=dist.get_global_rank(group, 0), group=group)


def _received(stage: int, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Tensors that ``stage`` sends, on the CPU."""
    source = dist.get_global_rank(group, stage)
    while True:
        heading: list[Any] = [None]
        dist.recv_object_list(heading, src=source, group=group)
        if heading[0] is None:
            return
        name, shape, dtype = heading[0]
        tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
        dist.recv(tensor, src=source, group=group)
        yield name, tensor.cpu()


def _siblings(name: str, parts: list[Tensor], architecture: GPTArchitecture) -> list[str]:
    """Names of the experts that stand at one place on all expert-parallel ranks."""
    match = _EXPERT.match(name)
    assert match is not None
    assert architecture.num_moe_experts is not None
    per_rank = architecture.num_moe_experts // len(parts)
    place = int(match[2]) % per_rank
    return [f"{match[1]}{rank * per_rank + place}{match[3]}" for rank in range(len(parts))]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
