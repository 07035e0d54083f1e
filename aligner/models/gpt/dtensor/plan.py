"""Tensor-parallel split of transformers' layers, and checks of models that are not supported."""

from typing import TYPE_CHECKING

from torch import nn

from aligner.architecture import GPTArchitecture, TransformersArchitecture
from aligner.checkpoint.hf.families import FAMILIES, config_to_hf
from aligner.config import ParallelConfig
from aligner.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Families with the modules that `split_layer` splits.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
# Families whose logits are divided, or whose layers do not tell their attention which rows are one
# sequence.
ONLY_BY_TRANSFORMERS = ("granite", "nemotron", "stablelm")
# Replicated weights that each rank applies to its own heads, so that gradients must be summed.
APPLIED_TO_OWN_HEADS = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")


def check_backend(family: str, architecture: GPTArchitecture, parallel: ParallelConfig) -> None:
    """Raise if this backend does not support the model or the layout."""
    if architecture.num_moe_experts is not None:
        raise LayoutError(
            f"policy.backend=dtensor does not support mixtures of experts in .nemo files, but the "
            f"model is a {family} with {architecture.num_moe_experts} experts. Use "
            "policy.backend=megatron, or give the model's Hugging Face directory"
        )
    is_own = isinstance(architecture, TransformersArchitecture)
    if family in ONLY_BY_TRANSFORMERS and not is_own:
        raise LayoutError(
            f"policy.backend=dtensor does not support {family} models in .nemo files. Use "
            "policy.backend=megatron, or give the model's Hugging Face directory"
        )
    if parallel.tensor > 1 and family not in LLAMA_LIKE:
        raise LayoutError(
            f"model.tensor_model_parallel_size={parallel.tensor}: policy.backend=dtensor does not "
            f"support tensor parallelism for {family} models, only for {', '.join(LLAMA_LIKE)}. "
            "Use 1 (data-parallel ranks shard the weights anyway)"
            + ("" if is_own else ", or policy.backend=megatron")
        )


def check_dropout(dropout: float | None, architecture: GPTArchitecture, *, trained: bool) -> None:
    """Raise if transformers' layers would ignore a part of ``model.dropout``.

    ``trained``: whether the role is trained. Otherwise the checkpoint's dropout (None) is ignored.
    """
    if isinstance(architecture, TransformersArchitecture):
        if dropout:
            raise ConfigError(
                f"model.dropout={dropout:g}: {architecture.family} models are trained without "
                "dropout. Set it to 0"
            )
        return
    hidden = architecture.with_dropout(dropout).hidden_dropout
    family = config_to_hf(architecture)[0].model_type
    has_key = "hidden_dropout" in FAMILIES[family].keys
    if hidden and not has_key and (trained or dropout is not None):
        shown = f"null, {hidden:g} in the checkpoint" if dropout is None else f"{dropout:g}"
        raise ConfigError(
            f"model.dropout={shown}: policy.backend=dtensor does not support dropout of hidden "
            f"states for {family} models. Set it to 0, or use policy.backend=megatron"
        )


def split_layer(layer: nn.Module, mesh: "DeviceMesh") -> None:
    """Split the linears of a decoder layer over ``mesh``, by heads and by MLP columns."""
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
    # Every rank has loaded the full weights, so that none must be sent.
    parallelize_module(layer, mesh, plan, src_data_rank=None)


def split_vocabulary(embedding: nn.Module, lm_head: nn.Module | None, mesh: "DeviceMesh") -> None:
    """Split the embedding, and the output layer if any, over ``mesh`` by vocabulary."""
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
