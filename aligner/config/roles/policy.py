"""Models of policy and critic, and what the two backends do not have."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from aligner.config.combinations import multiples_near
from aligner.config.parse import field_types, refuse
from aligner.config.roles.model import LAYOUT_KEYS, MegatronOnly, TrainedModelConfig
from aligner.foreign_keys import shown


@dataclass(frozen=True)
class BackendConfig:
    """The library behind policy and critic."""

    backend: Literal["megatron", "dtensor"] = "megatron"
    """Library behind policy and critic.

    `megatron`: megatron-core, all layouts. `dtensor`: transformers' models, sharded by FSDP2 and
    tensor-parallel DTensors (docs/value_parity.md).
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse layouts, adapters and token budgets that the backend does not have."""
        yield from model_problems(self.backend, run.model)
        critic = getattr(run, "critic", None)
        if critic is not None and critic.own_layout:
            of_critic = critic.laid_out(run.model)
            yield from _budget_problems(of_critic, "critic")
            if self.backend == "dtensor":
                yield from _dtensor_problems(of_critic, "critic", LAYOUT_KEYS)


def check_policy_backend(backend: str, model: TrainedModelConfig) -> None:
    """Refuse a model's layout, adapters or token budgets that a backend does not have."""
    refuse(model_problems(backend, model))


def model_problems(backend: str, model: TrainedModelConfig) -> Iterator[str]:
    """Yield a message for each rule that the section ``model`` breaks with a backend."""
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        yield (
            "model.sequence_packing.enabled=true and model.dynamic_batching.enabled=true exclude "
            "each other. Set one of them to false (packing wastes less)"
        )
    yield from _budget_problems(model, "model")
    if model.overlap_param_gather and not model.overlap_grad_reduce:
        yield (
            "model.overlap_param_gather=true collects weights by the buckets that gradients are "
            "summed in. Set model.overlap_grad_reduce=true too, or model.overlap_param_gather=false"
        )
    if model.peft.lora is not None:
        yield from _adapter_problems(backend, model)
    elif model.peft.restore_from_path is not None:
        yield (
            f"model.peft.restore_from_path={model.peft.restore_from_path} names adapters, and "
            "model.peft.peft_scheme is null. Set it to lora"
        )
    if backend == "dtensor":
        yield from _dtensor_problems(model, "model", [each.name for each in fields(model)])


def _budget_problems(model: TrainedModelConfig, key: str) -> Iterator[str]:
    parallel, rounded = model.parallel, model.sequence_length_round
    multiple = math.lcm(
        parallel.sequence_multiple, parallel.context * parallel.row_multiple(rounded)
    )
    for name, tokens in model.token_limits.items():
        if tokens % multiple:
            yield (
                f"model.{name}={tokens} does not divide by {multiple}, which "
                f"{key}.context_parallel_size={parallel.context}, "
                f"{key}.tensor_model_parallel_size={parallel.tensor} with "
                f"{key}.sequence_parallel={shown(parallel.sequence_parallel)} and lengths in "
                f"multiples of {rounded} need; nearest that work: "
                f"{multiples_near(tokens, multiple)}"
            )


def _adapter_problems(backend: str, model: TrainedModelConfig) -> Iterator[str]:
    lora, whole = model.peft.lora_tuning, "model.peft.peft_scheme=null"
    if backend != "megatron":
        yield (
            f"policy.backend={backend} trains all weights, and model.peft.peft_scheme=lora. Set "
            f"policy.backend=megatron, or {whole}"
        )
    if not lora.target_modules:
        yield (
            "model.peft.lora_tuning.target_modules is empty, so nothing would be trained. Give "
            "all, or some of attention_qkv, attention_dense, mlp_fc1 and mlp_fc2"
        )
    if lora.adapter_dropout and model.activations_checkpoint_granularity == "full":
        yield (
            f"model.peft.lora_tuning.adapter_dropout={lora.adapter_dropout:g}: layers that are "
            "computed again (model.activations_checkpoint_granularity=full) no longer know their "
            "tokens. Set it to 0, or activations_checkpoint_granularity to selective or null"
        )
    if model.fp8 is not None:
        yield (
            f"model.fp8={model.fp8}: adapters sit on megatron-core's own linears, and 8-bit "
            f"products are Transformer Engine's. Set model.fp8=null, or {whole}"
        )
    if model.layer_spec == "transformer_engine":
        yield (
            "model.layer_spec=transformer_engine: adapters sit on megatron-core's own linears. Set "
            f"model.layer_spec=auto, or {whole}"
        )
    if model.overlap_param_gather:
        yield (
            "model.overlap_param_gather=true, and model.peft.peft_scheme=lora: adapters are too "
            "small to be worth it. Set model.overlap_param_gather=false"
        )


def _dtensor_problems(model: TrainedModelConfig, key: str, names: Sequence[str]) -> Iterator[str]:
    """Options among ``names`` that megatron-core alone has."""
    if model.rollout.offload_gradients:
        yield (
            f"{model.rollout_key}.offload_gradients=true: policy.backend=dtensor keeps no gradient "
            "buffers. Set it to false"
        )
    for name in names:
        value, default = getattr(model, name), getattr(TrainedModelConfig, name, None)
        for mark in get_args(field_types(type(model))[name]):
            if isinstance(mark, MegatronOnly) and value != default:
                yield (
                    f"{key}.{name}={shown(value)}: policy.backend=dtensor has data and tensor "
                    f"parallelism alone, and {mark.instead}. Set {key}.{name}={shown(default)}, or "
                    "policy.backend=megatron, which has it"
                )
