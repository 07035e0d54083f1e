"""Tensor-parallel split of transformers' layers, and checks that refuse unsupported models."""

import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.any_model import body_path, empty_model, model_config
from aligner.checkpoint.hf.families import FAMILIES
from aligner.config import LoraConfig, ParallelConfig
from aligner.device import accelerator
from aligner.errors import ConfigError, LayoutError
from aligner.models.gpt.dtensor.shards import ParameterShard
from aligner.parallel.groups import ParallelState

# Style of replicated weights that each rank applies to its own heads: gradients must be summed.
SUMMED = "replicated_with_grad_allreduce"
COLUMNS = "colwise"  # style of linear layers: each rank computes a part of the outputs
# Styles of transformers' plans that are supported.
STYLES = (
    *(COLUMNS, "colwise_gather_output", "rowwise", "rowwise_split_input"),
    *("embedding_rowwise", SUMMED),
)


def check_backend(
    architecture: GPTArchitecture, parallel: ParallelConfig, lora: LoraConfig | None = None
) -> None:
    """Raise if the dtensor backend does not support the model. Reads no weights."""
    config = model_config(architecture)
    family, plan = config.model_type, config.base_model_tp_plan or {}
    experts = architecture.num_moe_experts
    # Models with a table of names are built without experts and adapters.
    if architecture.has_table and (experts or lora is not None):
        part = f"{experts} experts" if experts else "adapters (model.peft.peft_scheme=lora)"
        raise ConfigError(
            f"policy.backend=dtensor does not support {family} models with {part} in .nemo and "
            ".gguf files. Set policy.backend=megatron, or give the model's Hugging Face directory"
        )
    if parallel.tensor == 1:
        return
    # Tensor parallelism: transformers' plan must split with styles of `STYLES` and be complete.
    key = f"model.tensor_model_parallel_size={parallel.tensor}"
    unknown = sorted(set(plan.values()) - {*STYLES})
    reason = f"transformers has no tensor-parallel plan for {family} models"
    if unknown:
        reason = f"transformers' plan for {family} models uses {', '.join(unknown)}"
    elif plan and (left_out := _left_out(architecture, plan)):
        reason = f"transformers' plan for {family} models leaves out {', '.join(left_out)}"
    elif plan and lora is None:
        return
    elif plan:
        reason = "adapters (model.peft.peft_scheme=lora) are not split"
    raise LayoutError(
        f"{key}: policy.backend=dtensor does not support this size, because {reason}. Set it to 1 "
        "(data-parallel ranks shard the weights anyway)"
        + (", or use policy.backend=megatron" if architecture.has_table else "")
    )


def _left_out(architecture: GPTArchitecture, plan: Mapping[str, str]) -> list[str]:
    """Return the parameters that ``plan`` leaves whole although it splits their module."""
    if architecture.has_table:
        return []
    model = empty_model(architecture)
    split = tuple(name.rpartition(".")[0] + "." for name, style in plan.items() if style == COLUMNS)
    names = {plan_name(n) for n, _ in model.get_submodule(body_path(model)).named_parameters()}
    return sorted(
        name
        for name in names
        if name.startswith(split) and not {name, name.rpartition(".")[0]} & plan.keys()
    )


def check_dropout(dropout: float | None, architecture: GPTArchitecture, *, trained: bool) -> None:
    """Raise `ConfigError` if transformers' layers would ignore dropout of hidden states.

    ``dropout``: value of ``model.dropout``. With None, the checkpoint's dropout is checked, but
    only if the role is ``trained``.
    """
    hidden = architecture.with_dropout(dropout).hidden_dropout
    family, has_table = model_config(architecture).model_type, architecture.has_table
    has_key = has_table and "hidden_dropout" in FAMILIES[family].keys
    if hidden and not has_key and (trained or dropout is not None):
        shown = f"null, {hidden:g} in the checkpoint" if dropout is None else f"{dropout:g}"
        raise ConfigError(
            f"model.dropout={shown}: policy.backend=dtensor does not support dropout of hidden "
            f"states for {family} models. Set model.dropout=0"
            + (", or use policy.backend=megatron" if has_table else "")
        )


def plan_name(name: str) -> str:
    """Replace each index in the name of a module by ``*``, as tensor-parallel plans do."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def split_layer(layer: nn.Module, name: str, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split a decoder layer over ``mesh``. ``plan``: transformers' split style by module name."""
    styles = {
        COLUMNS: ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    for part, module in list(layer.named_modules(prefix=name)):
        style = styles.get(plan.get(plan_name(part), ""))
        if style is not None:
            # Every rank has loaded the full weights, so that torch need not broadcast them.
            parallelize_module(module, mesh, style, src_data_rank=None)


@torch.no_grad()
def check_gradients(shards: Sequence[ParameterShard], parallel: ParallelState) -> None:
    """Raise if a replicated weight's gradient differs between tensor-parallel ranks.

    Call this on all ranks, after a backward pass.
    """
    whole = [shard for shard in shards if shard.split_dim is None and not shard.summed]
    if not whole:
        return
    norms = torch.zeros(len(whole), 2, device=accelerator.device())
    for shard, sizes in zip(whole, norms, strict=True):
        if shard.gradient is not None:
            both = torch.stack([shard.gradient, -shard.gradient])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=parallel.tp_group)
            # Norms of the ranks' maximum minus their minimum, and of both stacked.
            sizes[0] = torch.linalg.vector_norm(both.sum(0))
            sizes[1] = torch.linalg.vector_norm(both)
    dist.all_reduce(norms, dist.ReduceOp.MAX)
    differs = norms[:, 0] > 0.01 * norms[:, 1].clamp(min=1e-6 * norms.max())
    names = [shard.name for shard, wrong in zip(whole, differs.tolist(), strict=True) if wrong]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise LayoutError(
            f"model.tensor_model_parallel_size={parallel.config.tensor}: with transformers' plan, "
            f"ranks compute different gradients of {', '.join(names[:3])}{more}. Set it to 1 "
            "(data-parallel ranks shard the weights anyway)"
        )


def split_vocabulary(embedding: nn.Module, lm_head: nn.Module | None, mesh: DeviceMesh) -> None:
    """Split the rows of the embedding and of any output layer over ``mesh``. They stay tied."""
    rows = RowwiseParallel(input_layouts=Replicate())
    if lm_head is not None:
        is_tied = lm_head.weight is embedding.weight
        parallelize_module(lm_head, mesh, ColwiseParallel(), src_data_rank=None)
    parallelize_module(embedding, mesh, rows, src_data_rank=None)
    if lm_head is not None and is_tied:
        lm_head.weight = embedding.weight
