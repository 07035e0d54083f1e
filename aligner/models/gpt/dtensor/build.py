"""Build a transformers model, sharded by FSDP2 and tensor-parallel DTensors.

Weights are loaded and sharded layer by layer. In addition to its shards, a process stores at most
one full layer or the full embeddings.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapted_weights
from aligner.checkpoint.hf.any_model import body_path, empty_model, model_config, path_of
from aligner.device import accelerator
from aligner.errors import CheckpointError, ConfigError
from aligner.logprobs.output_layer import ValueHead
from aligner.models.gpt.dtensor import attention as dtensor_attention
from aligner.models.gpt.dtensor.adapters import add_adapters
from aligner.models.gpt.dtensor.module import TransformersModel, Way
from aligner.models.gpt.dtensor.plan import SUMMED, plan_name, split_layer, split_vocabulary
from aligner.models.gpt.dtensor.shards import ParameterShard
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import ParallelState


def build_sharded(
    architecture: GPTArchitecture,
    weights: Mapping[str, Tensor] | None,
    parallel: ParallelState,
    settings: RoleSettings,
    *,
    head_outputs: int,
    way: Way,
) -> tuple[TransformersModel, list[ParameterShard]]:
    """Build a model and this process's shard of each parameter. Parameters are float32.

    Args:
        weights: full float tensors [...] by Hugging Face names. None: weights stay uninitialised.
        settings: compute dtype, recomputation, LoRA adapters and their seed. With adapters, only
            the adapters and a head are trained.
        head_outputs: number of outputs of a head that replaces the output layer, 0 for no head.
        way: whether micro-batches are packed, and for which attention (see `Way`).
    """
    dtype = settings.dtype
    model = _empty_model(architecture, settings, head_outputs, way)
    _move_buffers(model)
    mesh = init_device_mesh(
        accelerator.device().type,
        (parallel.dp_size, parallel.config.tensor),
        mesh_dim_names=("data", "tensor"),
    )
    # Full shapes are read before the parameters become sharded.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plan: Mapping[str, str] = {}
    if parallel.config.tensor > 1:
        plan = model_config(architecture).base_model_tp_plan or {}
    split = _fill_and_shard(model, weights, mesh, dtype, plan)
    shards = [
        ParameterShard(
            name,
            shapes[name],
            split.get(name),
            summed=plan.get(plan_name(model.in_body(name).rpartition(".")[0])) == SUMMED,
            dtype=torch.float32 if name.startswith("score.") else dtype,
            parameter=parameter,
            parallel=parallel,
        )
        for name, parameter in model.named_parameters()
    ]
    return model, shards


def build_whole(
    architecture: GPTArchitecture, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> nn.Module:
    """Build an unsharded causal language model of transformers in evaluation mode.

    ``weights``: full parameters, float [out, in] or [out], and persistent buffers [...], by their
    names in the model. Tied parameters have one entry. ``dtype``: dtype of the parameters.
    """
    causal = empty_model(architecture, dtype)
    _fill(causal, "", weights, {}, dtype)
    for name, buffer in causal.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])
    _move_buffers(causal)
    return causal.eval().requires_grad_(False)


def _move_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, accelerator.to_device(buffer))


def _empty_model(
    architecture: GPTArchitecture, settings: RoleSettings, head_outputs: int, way: Way
) -> TransformersModel:
    """Build the model from transformers' class, with parameters on the meta device."""
    dtensor_attention.register()
    causal, recompute = empty_model(architecture, settings.dtype), settings.recompute
    problem = ""
    if way == "aligner":
        is_selective = recompute == "selective"
        causal.set_attn_implementation(
            dtensor_attention.RECOMPUTED if is_selective else dtensor_attention.NAME
        )
    elif recompute == "selective":
        problem = (
            "models do not run with aligner's attention, which selective recomputation needs. Set "
            "it to full or null"
        )
    if recompute == "full" and causal.supports_gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    elif recompute == "full":
        problem = "models of transformers cannot recompute layers. Set it to null"
    if problem:
        key = f"model.activations_checkpoint_granularity={recompute}"
        raise ConfigError(f"{key}: {architecture.family} {problem}")
    # A head replaces the output layer.
    body, parts = body_path(causal), dict(causal.named_children())
    output, score = None, None
    if head_outputs:
        score = ValueHead(architecture.hidden_size, outputs=head_outputs)
        first = body.partition(".")[0]
        parts = {first: parts[first]}
    else:
        output = path_of(causal, causal.get_output_embeddings())
    layer_classes = frozenset(causal._no_split_modules or ())
    model = TransformersModel(
        parts, body, output=output, score=score, layer_classes=layer_classes, way=way
    )
    if settings.lora is not None:
        model.adapted = adapted_weights(causal, settings.lora)
        add_adapters(model, model.adapted, settings.lora, settings.seed)
    return model


def _fill_and_shard(
    model: TransformersModel,
    weights: Mapping[str, Tensor] | None,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    plan: Mapping[str, str],
) -> dict[str, int]:
    """Load and shard the weights. Returns the split dimension of each tensor-parallel parameter."""
    names = {module: name for name, module in model.named_modules()}
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    split: dict[str, int] = {}
    filled: dict[nn.Parameter, nn.Parameter] = {}

    def shard(block: nn.Module, policy: MixedPrecisionPolicy) -> None:
        for name, parameter in block.named_parameters(prefix=names[block]):
            # FSDP2 has not sharded this block yet, so that DTensors have only the tensor mesh.
            if (
                isinstance(parameter, DTensor)
                and parameter.device_mesh.mesh_dim_names == ("tensor",)
                and isinstance(parameter.placements[0], Shard)
            ):
                split[name] = parameter.placements[0].dim
        # The root is resharded too, because its weights can change between forward passes.
        fully_shard(block, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=True)

    for layer in model.layers:
        _fill(layer, names[layer], weights, filled)
        if mesh["tensor"].size() > 1:
            split_layer(layer, model.in_body(names[layer]), plan, mesh["tensor"])
        shard(layer, policy)
    if model.score is not None:
        _fill_head(model.score, weights)
        shard(model.score, MixedPrecisionPolicy())
    _fill(model, "", weights, filled)
    for name, buffer in model.named_buffers():
        if weights is not None and name in weights:
            buffer.copy_(weights[name])
    if mesh["tensor"].size() > 1:
        split_vocabulary(model.embedding, model.output_layer, mesh["tensor"])
    shard(model, policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by global counts, so that gradients are summed over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return split


@torch.no_grad()
def _fill(
    block: nn.Module,
    prefix: str,
    weights: Mapping[str, Tensor] | None,
    filled: dict[nn.Parameter, nn.Parameter],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Replace the meta parameters of a block by parameters with the values of ``weights``.

    ``filled``: maps replaced parameters to new ones, so that tied parameters stay tied.
    """
    for name, parameter in list(block.named_parameters(prefix, remove_duplicate=False)):
        if not parameter.is_meta:
            continue
        owner, _, leaf = name[len(prefix) + 1 if prefix else 0 :].rpartition(".")
        if parameter in filled:
            block.get_submodule(owner).register_parameter(leaf, filled[parameter])
            continue
        value = torch.empty(parameter.shape, dtype=dtype, device=accelerator.device())
        if weights is not None:
            if name not in weights:
                raise CheckpointError(
                    f"the checkpoint does not contain {name} of the model. A critic or reward "
                    "model has no output layer: set model.restore_from_path to a language model"
                )
            value.copy_(weights[name])
        filled[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        block.get_submodule(owner).register_parameter(leaf, filled[parameter])


@torch.no_grad()
def _fill_head(head: ValueHead, weights: Mapping[str, Tensor] | None) -> None:
    """Load the weights of ``head``, zeros if ``weights`` contain no head."""
    for leaf, parameter in list(head.named_parameters()):
        value = torch.zeros(parameter.shape, device=accelerator.device())
        name = f"score.{leaf}"
        if weights is not None and name in weights:
            saved = weights[name]
            if saved.shape != value.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(saved.shape)}, but this role needs "
                    f"{tuple(value.shape)}. Set restore_from_path to a model without a head, or to "
                    "a model whose head has the same number of outputs"
                )
            value.copy_(saved)
        head.register_parameter(leaf, nn.Parameter(value))
