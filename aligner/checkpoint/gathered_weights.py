"""Canonical weights of a model that lives on many ranks, one tensor at a time."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import OUTPUT_LAYER, REWARD_HEAD, expected_shapes, merge
from aligner.checkpoint.gpt_weights import merging, model_parameters
from aligner.device import accelerator

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")


class GatheredWeights(Mapping[str, Tensor]):
    """Whole tensors on every rank, each joined when it is indexed and not kept afterwards.

    Adapters are merged into the weights, as they are when a tensor is indexed.

    Indexing is collective: every rank of the model-parallel groups indexes the same names in the
    same order. A tensor is on the device, detached, and may share memory with a parameter.

    Args:
        gpt: this rank's share of the model.
        architecture: its shape.
        tp_group: the ranks that hold the other tensor-parallel shares; None: there are none.
        pp_group: the same of pipeline stages.
        ep_group: the same of experts.
    """

    def __init__(
        self,
        gpt: "GPTModel",
        architecture: GPTArchitecture,
        *,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
        ep_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._architecture = architecture
        self._shapes = expected_shapes(architecture)
        self._tp, self._pp, self._ep = (_split(g) for g in (tp_group, pp_group, ep_group))
        own = dict(model_parameters(gpt, architecture))
        if architecture.tie_embeddings:  # the last stage's copy of the first stage's embedding
            own.pop(OUTPUT_LAYER, None)
        self._own = {name: tensor for name, tensor in own.items() if name not in REWARD_HEAD}
        self._merged = merging(gpt)
        self._places = self._find_stages()

    def __getitem__(self, name: str) -> Tensor:
        local = self._local_name(name)
        stage, dtype = self._places[local]
        if self._pp is None:
            return self._joined(name, self._merged(self._own[local]))
        if stage == self._pp.rank():
            tensor = self._joined(name, self._merged(self._own[local])).contiguous()
        else:
            tensor = torch.empty(self._shapes[name], dtype=dtype, device=accelerator.device())
        dist.broadcast(tensor, group=self._pp, group_src=stage)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _find_stages(self) -> dict[str, tuple[int, torch.dtype]]:
        """Pipeline stage and dtype of every tensor that some stage's rank like this one holds."""
        mine = {name: tensor.dtype for name, tensor in self._own.items()}
        stages: list[dict[str, torch.dtype]] = [mine]
        if self._pp is not None:
            stages = [{}] * self._pp.size()
            dist.all_gather_object(stages, mine, group=self._pp)
        return {name: (n, dtype) for n, held in enumerate(stages) for name, dtype in held.items()}

    def _joined(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor on this stage, out of the shares of its ranks."""
        if self._ep is not None and _EXPERT.search(name):
            holder = self._expert_number(name) // self._experts_per_rank()
            tensor = own.contiguous() if holder == self._ep.rank() else torch.empty_like(own)
            dist.broadcast(tensor, group=self._ep, group_src=holder)
            return tensor
        if self._tp is None:
            return merge(name, [own], self._architecture)
        parts = [torch.empty_like(own) for _ in range(self._tp.size())]
        dist.all_gather(parts, own.contiguous(), group=self._tp)
        return merge(name, parts, self._architecture)

    def _local_name(self, name: str) -> str:
        """Name of this rank's tensor in the place of ``name``: another expert, where shared out."""
        if self._ep is None or not _EXPERT.search(name):
            return name
        count = self._experts_per_rank()
        number = self._ep.rank() * count + self._expert_number(name) % count
        return _EXPERT.sub(str(number), name)

    def _expert_number(self, name: str) -> int:
        match = _EXPERT.search(name)
        assert match is not None
        return int(match[1])

    def _experts_per_rank(self) -> int:
        assert self._ep is not None
        assert self._architecture.num_moe_experts is not None
        return self._architecture.num_moe_experts // self._ep.size()


def _split(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None
