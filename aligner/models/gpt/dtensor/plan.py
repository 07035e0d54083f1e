"""Tensor-parallel split of transformers' layers, and models that this backend refuses."""

from typing import TYPE_CHECKING

from torch import nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import config_to_hf
from aligner.config import ParallelConfig
from aligner.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Families whose layers have the modules that `split_layer` names.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
# Weights that every rank holds but applies to its own heads: their gradients are parts of a sum.
APPLIED_TO_OWN_HEADS = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")


def check_backend(family: str, architecture: GPTArchitecture, parallel: ParallelConfig) -> None:
    """Refuse models and layouts that this backend does not have."""
    if architecture.num_moe_experts is not None:
        raise LayoutError(
            f"policy.backend=dtensor has no mixture of experts, and the model is a {family} with "
            f"{architecture.num_moe_experts} experts; use policy.backend=megatron"
        )
    if parallel.tensor > 1 and family not in LLAMA_LIKE:
        raise LayoutError(
            f"model.tensor_model_parallel_size={parallel.tensor}: policy.backend=dtensor has no "
            f"tensor parallelism for {family} models, only for {', '.join(LLAMA_LIKE)}; use 1 "
            "(weights are sharded over data-parallel ranks anyway), or policy.backend=megatron"
        )


def check_dropout(dropout: float | None, architecture: GPTArchitecture, *, trained: bool) -> None:
    """Refuse ``model.dropout`` where transformers' layers would leave half of it out.

    ``trained``: whether the role learns; the checkpoint's own dropout (None) matters only then.
    """
    hidden = architecture.with_dropout(dropout).hidden_dropout
    family = config_to_hf(architecture)[0].model_type
    if hidden and family in LLAMA_LIKE and (trained or dropout is not None):
        shown = f"null, {hidden:g} in the checkpoint" if dropout is None else f"{dropout:g}"
        raise ConfigError(
            f"model.dropout={shown}: policy.backend=dtensor has no dropout of hidden states "
            f"for {family} models; set it to 0, or use policy.backend=megatron"
        )


def split_layer(layer: nn.Module, mesh: "DeviceMesh") -> None:
    """Make one decoder layer's linears DTensors: heads and inner columns over ``mesh``."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    # Every rank has read the whole weights: nobody needs to send them.
    parallelize_module(layer, mesh, plan, src_data_rank=None)


def split_vocabulary(embedding: nn.Module, lm_head: nn.Module | None, mesh: "DeviceMesh") -> None:
    """Make the embedding, and the output layer where there is one, DTensors by vocabulary."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(embedding, mesh, rows, src_data_rank=None)
    if lm_head is not None:
        parallelize_module(lm_head, mesh, ColwiseParallel(), src_data_rank=None)
