"""Parameters of a megatron-core GPT model under canonical names, and loading them."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
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
    split,
)
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
            expert = _EXPERT.match(name)
            if expert is not None:  # numbered from 0 on every expert-parallel rank
                number = int(expert[2]) + layer.mlp.local_expert_indices[0]
                name = f"{expert[1]}{number}{expert[3]}"
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
        if isinstance(weights, SharedWeights):
            tensor = weights.share(source, *place)
        else:
            tensor = weights[source]
            check_shape(source, tensor.shape, shapes[source])
            tensor = split(source, tensor, architecture, *place)
        check_shape(f"{name} on tensor rank {tp_rank}", tensor.shape, tuple(parameter.shape))
        parameter.copy_(tensor)
