"""Build a transformers model as FSDP2 and tensor-parallel DTensors from canonical weights.

The model is built without memory for its weights. Then, layer by layer, weights are loaded, split
over tensor-parallel ranks and sharded over data-parallel ranks. In addition to its share, a process
therefore stores at most one full layer (or the embeddings).
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import config_to_hf
from aligner.device import accelerator
from aligner.errors import CheckpointError
from aligner.models.gpt.dtensor import attention as dtensor_attention
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.dtensor.plan import (
    APPLIED_TO_OWN_HEADS,
    check_backend,
    split_layer,
    split_vocabulary,
)
from aligner.models.gpt.dtensor.shards import ParameterShard
from aligner.models.gpt.role.value import ValueHead
from aligner.parallel.groups import ParallelState

Recompute = Literal["full", "selective"]


def build_sharded(
    architecture: GPTArchitecture,
    weights: Mapping[str, Tensor] | None,
    parallel: ParallelState,
    *,
    dtype: torch.dtype,
    recompute: Recompute | None = None,
    with_scalar_head: bool = False,
) -> tuple[TransformersModel, list[ParameterShard]]:
    """Build this process's share of a model.

    Args:
        architecture: shape of the model.
        weights: full tensors by Hugging Face's names, or None to leave weights uninitialised.
        parallel: parallel layout, with the data- and tensor-parallel groups.
        dtype: dtype of the forward and backward pass. Stored weights, gradients and the scalar head
            are float32.
        recompute: which activations to recompute in backward.
        with_scalar_head: use a scalar head in place of the output layer.
    """
    family, config = config_to_hf(architecture)
    check_backend(family.model_type, architecture, parallel.config)
    model = _empty_model(architecture, config, recompute, with_scalar_head)
    mesh = init_device_mesh(
        accelerator.device().type,
        (parallel.dp_size, parallel.config.tensor),
        mesh_dim_names=("data", "tensor"),
    )
    # Full shapes are read before the parameters become sharded.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    split = _fill_and_shard(model, weights, mesh, dtype)
    shards = [
        ParameterShard(
            name,
            shapes[name],
            split.get(name),
            summed=parallel.config.tensor > 1 and name.endswith(APPLIED_TO_OWN_HEADS),
            dtype=torch.float32 if name.startswith("score.") else dtype,
            parameter=parameter,
            parallel=parallel,
        )
        for name, parameter in model.named_parameters()
    ]
    return model, shards


def _empty_model(
    architecture: GPTArchitecture,
    config: Mapping[str, Any],
    recompute: Recompute | None,
    with_scalar_head: bool,
) -> TransformersModel:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel

    dtensor_attention.register()
    names = {None: dtensor_attention.NAME, "full": dtensor_attention.NAME}
    # Parameters without memory, buffers on the device.
    with init_empty_weights(include_buffers=False):
        body = AutoModel.from_config(
            AutoConfig.for_model(**config),
            attn_implementation=names.get(recompute, dtensor_attention.RECOMPUTED),
            dtype=torch.float32,
        )
        lm_head = None
        if not (with_scalar_head or architecture.tie_embeddings):
            lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        score = ValueHead(architecture.hidden_size) if with_scalar_head else None
    if recompute == "full":
        body.gradient_checkpointing_enable({"use_reentrant": False})
    for module in body.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, accelerator.to_device(buffer))
    return TransformersModel(body.base_model_prefix, body, lm_head, score)


def _fill_and_shard(
    model: TransformersModel,
    weights: Mapping[str, Tensor] | None,
    mesh: DeviceMesh,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Load and shard the weights, and return the tensor-parallel dimension of split parameters."""
    names = {module: name for name, module in model.named_modules()}
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    split: dict[str, int] = {}

    def shard(block: nn.Module, policy: MixedPrecisionPolicy) -> None:
        split.update(_split_dims(names[block], block))
        # The root is resharded too, because its weights can change between forward passes.
        fully_shard(block, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=True)

    for layer in model.layers:
        _fill(layer, names[layer], weights)
        if mesh["tensor"].size() > 1:
            split_layer(layer, mesh["tensor"])
        shard(layer, policy)
    if model.score is not None:
        _fill_head(model.score, weights)
        shard(model.score, MixedPrecisionPolicy())
    _fill(model, "", weights)
    if mesh["tensor"].size() > 1:
        split_vocabulary(model.embedding, model.lm_head, mesh["tensor"])
    shard(model, policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by global counts, so that gradients are summed over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return split


@torch.no_grad()
def _fill(block: nn.Module, prefix: str, weights: Mapping[str, Tensor] | None) -> None:
    """Allocate the parameters of a block that have no memory yet, and load their weights."""
    for name, parameter in list(block.named_parameters(prefix=prefix)):
        if not parameter.is_meta:
            continue
        value = torch.empty(parameter.shape, device=accelerator.device())
        if weights is not None:
            if name not in weights:
                raise CheckpointError(
                    f"the checkpoint does not contain {name} of the model. If it is a critic or "
                    "reward model, without an output layer, start the policy from a language model"
                )
            value.copy_(weights[name])
        owner, _, leaf = name[len(prefix) + 1 if prefix else 0 :].rpartition(".")
        block.get_submodule(owner).register_parameter(leaf, nn.Parameter(value))


@torch.no_grad()
def _fill_head(head: ValueHead, weights: Mapping[str, Tensor] | None) -> None:
    """Load the head, or initialise it to zero if ``weights`` contain none."""
    for leaf, parameter in list(head.named_parameters()):
        value = torch.zeros(parameter.shape, device=accelerator.device())
        name = f"score.{leaf}"
        if weights is not None and name in weights:
            if weights[name].shape != value.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(weights[name].shape)}, but this role needs "
                    f"{tuple(value.shape)}. Start from a model without a head, or with one label"
                )
            value.copy_(weights[name])
        head.register_parameter(leaf, nn.Parameter(value))


def _split_dims(prefix: str, block: nn.Module) -> dict[str, int]:
    dims = {}
    for name, parameter in block.named_parameters(prefix=prefix):
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tensor",):
            placement = parameter.placements[0]
            if isinstance(placement, Shard):
                dims[name] = placement.dim
    return dims
