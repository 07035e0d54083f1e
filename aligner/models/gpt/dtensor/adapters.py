"""LoRA adapters in a transformers model, and a check that every adapter gets a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aligner.checkpoint.adapters import AdaptedWeight, distinct_suffixes, is_target
from aligner.config import LoraConfig
from aligner.device import accelerator
from aligner.errors import ConfigError
from aligner.models.gpt.dtensor.shards import ParameterShard
from aligner.models.gpt.lora import Adapter, initial_matrix
from aligner.parallel.groups import ParallelState


def add_adapters(
    model: nn.Module, weights: Sequence[AdaptedWeight], lora: LoraConfig, seed: int
) -> None:
    """Add a LoRA adapter to each of ``weights``, and freeze all other parameters.

    A linear layer adds its adapter's output to its own output. Mixture-of-experts layers read one
    3-D parameter for all experts. Their forward pass sees this parameter with the adapter merged.
    Modules that share a weight share its adapter. ``seed``: seed of the initial matrices.
    """
    model.requires_grad_(False)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    for weight in weights:
        *experts, outputs, inputs = weight.shape
        with accelerator.device():
            adapter = Adapter(inputs, outputs, lora, torch.float32, *experts)
        name, shape = f"{weight.adapter}.a", tuple(adapter.a.shape)
        adapter.a.data = accelerator.to_device(initial_matrix(name, shape, seed))
        for owner in owners[model.get_parameter(weight.parameter)]:
            owner.add_module(weight.adapter.rpartition(".")[2], adapter)
            if weight.is_of_experts:
                _merge_in_passes(owner, weight, adapter)
            else:
                owner.register_forward_hook(_add_output)


def _add_output(linear: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
    adapter = linear.lora
    assert isinstance(adapter, Adapter)
    # A subclass that returns more or less than the product has no adapter, and is thus refused.
    is_product = isinstance(output, Tensor) and output.shape[-1] == len(adapter.b)
    if adapter.enabled and is_product:
        return output + adapter.up(adapter.down(inputs[0]))
    return output


def _merge_in_passes(owner: nn.Module, weight: AdaptedWeight, adapter: Adapter) -> None:
    leaf = weight.name.rpartition(".")[2]

    def merge(*_: Any) -> None:
        # An attribute of the instance precedes the parameter, which keeps its name.
        if adapter.enabled:
            stored = owner.get_parameter(leaf)
            merged = weight.merged(stored, adapter.a, adapter.b, adapter.scale)
            owner.__dict__[leaf] = merged

    def remove(*_: Any) -> None:
        owner.__dict__.pop(leaf, None)

    owner.register_forward_pre_hook(merge)
    owner.register_forward_hook(remove, always_call=True)


def check_that_all_learn(
    shards: Sequence[ParameterShard],
    weights: Sequence[AdaptedWeight],
    lora: LoraConfig,
    parallel: ParallelState,
) -> None:
    """Check that every adapter has a gradient. Call this on all ranks, after a backward pass.
    Raises `ConfigError` if the model's code does not call an adapted layer, or no output depends on
    the layer.
    """
    gradients = {shard.name: shard.gradient for shard in shards}
    # Matrix B stands for its adapter, because the output depends on A through B only.
    has_gradient = [gradients[f"{weight.adapter}.b"] is not None for weight in weights]
    learns = torch.tensor(has_gradient, dtype=torch.int32, device=shards[0].local.device)
    dist.all_reduce(learns, dist.ReduceOp.MAX, group=parallel.dp_group)
    flags = dict(zip((weight.name for weight in weights), learns.tolist(), strict=True))
    learning = [name for name, learns_anywhere in flags.items() if learns_anywhere]
    idle = [name for name, learns_anywhere in flags.items() if not learns_anywhere]
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        targets = ",".join(
            target
            for target in distinct_suffixes(learning, idle)
            if not any(is_target(target, name) for name in idle)
        )
        raise ConfigError(
            f"model.peft.lora_tuning.target_modules=[{','.join(lora.target_modules)}]: adapters of "
            f"{', '.join(idle[:3])}{more} get no gradient, because the model's code does not call "
            "these layers or no output depends on them. Set "
            f"model.peft.lora_tuning.target_modules=[{targets}]"
        )
