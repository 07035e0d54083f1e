"""Copy canonical weights to and from a megatron-core GPT model in any parallel layout."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
from aligner.checkpoint.nemo.weights import LazyWeights
from aligner.device import accelerator
from aligner.errors import CheckpointError
from aligner.parallel.collectives import gather_objects

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def canonical_parameters(gpt: "GPTModel") -> Iterator[tuple[str, Tensor]]:
    """Yield canonical name and tensor of the parameters of this rank's pipeline stage.

    The last stage's copy of a tied embedding is named ``output_layer.weight``. Names of adapter
    matrices end with `LORA_A` and `LORA_B`.
    """
    for key, parameter in gpt.named_parameters():
        name = canonical.canonical_name(key)
        if name is None:
            continue
        match = canonical.LAYER.match(name)
        if match is not None:
            layer = gpt.decoder.layers[int(match[1])]
            name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
            expert = canonical.EXPERT.search(name)
            if expert is not None:  # every expert-parallel rank numbers its experts from 0
                index = int(expert[1]) + layer.mlp.local_expert_indices[0]
                name = canonical.EXPERT.sub(str(index), name)
        yield name, parameter


def model_parameters(gpt: "GPTModel") -> dict[str, Tensor]:
    """Return `canonical_parameters` without adapters."""
    parameters = canonical_parameters(gpt)
    return {
        name: value
        for name, value in parameters
        if not name.endswith((canonical.LORA_A, canonical.LORA_B))
    }


@torch.no_grad()
def load_weights(
    gpt: "GPTModel",
    weights: canonical.Weights,
    architecture: GPTArchitecture,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> None:
    """Copy this rank's part of canonical ``weights`` into the model. A reward head is not copied.

    A model without an output layer ignores the weights' output layer. Raises `CheckpointError` if
    tensors are missing, unexpected, or have other shapes than the model's.
    """
    canonical.check_names(weights, architecture, "the checkpoint")
    shapes = canonical.expected_shapes(architecture)
    for name, parameter in model_parameters(gpt).items():
        if name in canonical.REWARD_HEAD:
            continue
        source = (
            canonical.EMBEDDING
            if name == canonical.OUTPUT_LAYER and architecture.tie_embeddings
            else name
        )
        if source not in weights:
            raise CheckpointError(
                f"the checkpoint lacks {name}, which the model needs. Give a checkpoint with an "
                "output layer"
            )
        # A parameter of global shape is whole, as experts are. The vocabulary is always split: a
        # padded part can have as many rows as the global tensor.
        is_vocabulary = source in (canonical.EMBEDDING, canonical.OUTPUT_LAYER)
        is_whole = shapes[source] == parameter.shape and not is_vocabulary
        rank, size = (0, 1) if is_whole else (tp_rank, tp_size)
        if isinstance(weights, LazyWeights):
            tensor = weights.share(source, rank, size)
        else:
            tensor = weights[source]
            canonical.check_shape(source, tensor.shape, shapes[source])
            tensor = canonical.split(source, tensor, architecture, rank, size)
        canonical.check_shape(
            f"{name} on tensor rank {tp_rank}", tensor.shape, tuple(parameter.shape)
        )
        parameter.copy_(tensor)
    if isinstance(weights, LazyWeights):
        weights.check()  # checksums, which threads computed during the copies


class GatheredTensors(canonical.LazyTensors):
    """Global tensors of a parallel model. A tensor is joined from its parts when it is indexed.

    All ranks of the model-parallel groups must create the object and index the same names in the
    same order. A tensor is on the device, detached, and may share memory with a parameter.

    Args:
        parts: canonical name → this rank's part, [out / tp, in] or [out, in / tp] as in `split`,
            of any dtype.
        names: canonical names of the global tensors, in order. Names that no rank has are skipped.
        architecture: architecture of the model.
        tp_group: group of tensor parallelism, or None.
        pp_group: group of pipeline parallelism, or None.
        ep_group: group of expert parallelism, or None.
        transform: function that is applied to each part before the parts are joined.
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
        transform: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._architecture, self._transform = architecture, transform
        self._tp, self._pp, self._ep = (
            group if group is not None and group.size() > 1 else None
            for group in (tp_group, pp_group, ep_group)
        )
        ep_size = 1 if self._ep is None else self._ep.size()
        self._experts = (architecture.num_moe_experts or 0) // ep_size  # of a rank
        self._parts = dict(parts)
        if architecture.tie_embeddings:  # the last stage's copy of the first stage's embedding
            self._parts.pop(canonical.OUTPUT_LAYER, None)
        forms = {name: (part.shape, part.dtype) for name, part in self._parts.items()}
        stages = [forms] if self._pp is None else gather_objects(forms, self._pp)
        # Name → pipeline stage that has the tensor, shape and dtype of a part.
        self._origins = {n: (stage, *f[n]) for stage, f in enumerate(stages) for n in f}
        super().__init__(name for name in names if self._local_name(name) in self._origins)

    def __getitem__(self, name: str) -> Tensor:
        stage = self._stage_of(name)
        if self._pp is None:
            return self._joined(name)
        is_local = stage == self._pp.rank()
        tensor = self._joined(name).contiguous() if is_local else self._empty(name)
        dist.broadcast(tensor, group=self._pp, group_src=stage)
        return tensor

    @torch.no_grad()
    def on_rank_zero(self) -> dict[str, Tensor]:
        """Return name → tensor on the CPU on rank 0, and an empty dict on other ranks.

        All ranks must call this method. On other ranks, one tensor is in memory at a time.
        """
        stage = 0 if self._pp is None else self._pp.rank()
        first, rank = None, None
        if dist.is_initialized():
            # megatron-core's pipeline stages are blocks of consecutive ranks.
            stages = 1 if self._pp is None else self._pp.size()
            first, rank = stage * (dist.get_world_size() // stages), dist.get_rank()
        result: dict[str, Tensor] = {}
        for name in self:
            tensor: Tensor | None = None  # frees the previous tensor before the next is joined
            group = self._ep if self._expert(name) else self._tp
            members = [rank] if group is None else dist.get_process_group_ranks(group)
            if first not in members:
                continue
            source = self._stage_of(name)
            if source == stage:
                tensor = self._joined(name)
                if stage > 0 and rank == first:
                    dist.send(tensor.contiguous(), group=self._pp, group_dst=0)
            elif rank == 0:
                tensor = self._empty(name)
                dist.recv(tensor, group=self._pp, group_src=source)
            if tensor is not None and rank in (0, None):
                result[name] = tensor.to("cpu", copy=True)
        return result

    def _stage_of(self, name: str) -> int:
        return self._origins[self._local_name(name)][0]

    def _empty(self, name: str) -> Tensor:
        """Return an uninitialised global tensor, to receive the values of another stage."""
        _, shape, dtype = self._origins[self._local_name(name)]
        if self._expert(name) is None:
            count = 1 if self._tp is None else self._tp.size()
            parts = [torch.empty(shape, device="meta") for _ in range(count)]
            shape = canonical.merge(name, parts, self._architecture).shape
        return torch.empty(shape, dtype=dtype, device=accelerator.device())

    def _joined(self, name: str) -> Tensor:
        part = self._transform(self._parts[self._local_name(name)])
        if self._ep is not None and (expert := self._expert(name)):
            tensor = part.contiguous() if expert[0] == self._ep.rank() else torch.empty_like(part)
            dist.broadcast(tensor, group=self._ep, group_src=expert[0])
            return tensor
        if self._tp is None or canonical.split_axis(name) is None or name in canonical.REWARD_HEAD:
            return canonical.merge(name, [part], self._architecture)  # equal on every rank
        parts = [torch.empty_like(part) for _ in range(self._tp.size())]
        dist.all_gather(parts, part.contiguous(), group=self._tp)
        return canonical.merge(name, parts, self._architecture)

    def _expert(self, name: str) -> tuple[int, int] | None:
        """Return an expert's expert-parallel rank and its index there, None for other weights."""
        match = canonical.EXPERT.search(name)
        return None if match is None or self._ep is None else divmod(int(match[1]), self._experts)

    def _local_name(self, name: str) -> str:
        """Return ``name``, for an expert with the number of this rank's expert at its index."""
        expert = self._expert(name)
        if self._ep is None or expert is None:
            return name
        return canonical.EXPERT.sub(str(self._ep.rank() * self._experts + expert[1]), name)


class GatheredWeights(GatheredTensors):
    """Canonical weights of a model. Inverse of `load_weights`.

    Adapters are merged into a weight when it is indexed. A reward head is included if the model has
    one. ``groups``: ``tp_group``, ``pp_group`` and ``ep_group`` of `GatheredTensors`.
    """

    def __init__(
        self, gpt: "GPTModel", architecture: GPTArchitecture, **groups: dist.ProcessGroup | None
    ) -> None:
        adapters = {part.weight: part.lora for part in gpt.modules() if hasattr(part, "lora")}

        def merged(parameter: Tensor) -> Tensor:
            adapter = adapters.get(parameter)
            return parameter.detach() if adapter is None else adapter.merged_into(parameter)

        names = (*canonical.expected_shapes(architecture), *canonical.REWARD_HEAD)
        super().__init__(model_parameters(gpt), names, architecture, **groups, transform=merged)
