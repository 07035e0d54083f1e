"""Backend of policy and critic, and rules for models that depend on the backend."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aligner.config.combinations import multiples_near
from aligner.config.parse import refuse
from aligner.config.roles.model import LAYOUT_KEYS, STAGE_KEYS, TrainedModelConfig
from aligner.foreign_keys import shown

# Options of which dtensor accepts only the default, and what dtensor does instead.
_MEGATRON_ONLY = {
    "pipeline_model_parallel_size": "fits more layers by model.tensor_model_parallel_size",
    "context_parallel_size": "fits longer sequences by model.tensor_model_parallel_size and "
    "model.activations_checkpoint_granularity=full",
    "expert_model_parallel_size": "keeps every expert on every rank",
    "sequence_parallel": "splits only layers",
    **dict.fromkeys(STAGE_KEYS, "has one stage"),
    "freeze_moe_router": "has no experts",
    "fp8": "has no 8-bit products",
    "layer_spec": "has transformers' layers",
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), "has FSDP2's overlap"),
}


@dataclass(frozen=True)
class BackendConfig:
    """Implementation of the policy and the critic."""

    backend: Literal["megatron", "dtensor"] = "megatron"
    """Implementation of policy and critic. `megatron`: megatron-core, in all layouts. `dtensor`:
    models of transformers, sharded by FSDP2 and tensor-parallel DTensors (docs/value_parity.md)."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each option of policy or critic that the backend lacks."""
        yield from model_problems(self.backend, run.model)
        if run.critic is not None and run.critic.layout_overrides:
            critic_model = run.critic.with_layout(run.model)
            yield from _budget_problems(critic_model, "critic")
            if self.backend == "dtensor":
                yield from _dtensor_problems(critic_model, "critic", LAYOUT_KEYS)


def check_policy_backend(backend: str, model: TrainedModelConfig) -> None:
    """Raise `ConfigError` if the backend does not support the options of ``model``."""
    refuse(model_problems(backend, model))


def model_problems(backend: str, model: TrainedModelConfig) -> Iterator[str]:
    """Yield an error message for each option of ``model`` that the backend does not support."""
    # Micro-batches and communication.
    if model.sequence_packing.enabled is True and model.dynamic_batching.enabled:
        yield (
            "model.sequence_packing.enabled=true and model.dynamic_batching.enabled=true exclude "
            "each other. Set one of them to false (packing wastes less)"
        )
    yield from _budget_problems(model, "model")
    if model.overlap_param_gather and not model.overlap_grad_reduce:
        yield (
            "model.overlap_param_gather=true uses the buckets of model.overlap_grad_reduce. Set "
            "model.overlap_grad_reduce=true too, or model.overlap_param_gather=false"
        )

    # Adapters and backend.
    if model.peft.lora is not None:
        yield from _adapter_problems(backend, model)
    elif model.peft.restore_from_path is not None:
        yield (
            f"model.peft.restore_from_path={model.peft.restore_from_path} names adapters, but "
            "model.peft.peft_scheme is null. Set it to lora"
        )
    if backend == "dtensor":
        yield from _dtensor_problems(model, "model", tuple(_MEGATRON_ONLY))


def _budget_problems(model: TrainedModelConfig, key: str) -> Iterator[str]:
    """Yield an error message for each token limit that padded rows would not fill exactly."""
    parallel, length_round = model.parallel, model.sequence_length_round
    multiple = math.lcm(
        parallel.sequence_multiple, parallel.context * parallel.row_multiple(length_round)
    )
    for name, tokens in model.token_limits.items():
        if tokens % multiple:
            yield (
                f"model.{name}={tokens} is not a multiple of {multiple}, which "
                f"{key}.context_parallel_size={parallel.context}, "
                f"{key}.tensor_model_parallel_size={parallel.tensor} with "
                f"{key}.sequence_parallel={shown(parallel.sequence_parallel)} and lengths in "
                f"multiples of {length_round} require. Use {multiples_near(tokens, multiple)}"
            )


def _adapter_problems(backend: str, model: TrainedModelConfig) -> Iterator[str]:
    # Options of the adapters.
    lora = model.peft.lora_tuning
    full_training = "model.peft.peft_scheme=null"
    if backend == "dtensor" and model.parallel.tensor > 1:
        yield (
            f"model.tensor_model_parallel_size={model.parallel.tensor}: policy.backend=dtensor "
            "does not split adapters over tensor-parallel ranks. Set it to 1 (data-parallel ranks "
            f"shard the weights anyway), or {full_training}"
        )
    if backend == "dtensor" and lora.adapter_dropout:
        yield (
            f"model.peft.lora_tuning.adapter_dropout={lora.adapter_dropout:g}: "
            "policy.backend=dtensor trains adapters without dropout. Set it to 0"
        )
    if not lora.target_modules:
        yield (
            "model.peft.lora_tuning.target_modules is empty, so no weight would be trained. Set it "
            "to all, or to some of attention_qkv, attention_dense, mlp_fc1 and mlp_fc2"
        )
    if lora.adapter_dropout and model.activations_checkpoint_granularity == "full":
        yield (
            f"model.peft.lora_tuning.adapter_dropout={lora.adapter_dropout:g}: the dropout depends "
            "on tokens, which recomputed layers (model.activations_checkpoint_granularity=full) do "
            "not receive. Set it to 0, or activations_checkpoint_granularity to selective or null"
        )

    # Options of the model that exclude adapters.
    for name, value, default in (
        ("fp8", model.fp8, "null"),
        ("layer_spec", model.layer_spec, "auto"),
    ):
        if value not in (None, "auto", "local"):
            yield (
                f"model.{name}={value} needs Transformer Engine's linears, and adapters need "
                f"megatron-core's. Set model.{name}={default}, or {full_training}"
            )
    if model.overlap_param_gather:
        yield (
            "model.overlap_param_gather=true does not work with model.peft.peft_scheme=lora, whose "
            "weights are too few to benefit. Set model.overlap_param_gather=false"
        )


def _dtensor_problems(model: TrainedModelConfig, key: str, names: Sequence[str]) -> Iterator[str]:
    if model.rollout.offload_gradients:
        yield (
            f"{model.rollout_key}.offload_gradients=true: policy.backend=dtensor has no gradient "
            "buffers. Set it to false"
        )
    for name in (option for option in _MEGATRON_ONLY if option in names):
        value, default = getattr(model, name), getattr(TrainedModelConfig, name)
        if value != default:
            yield (
                f"{key}.{name}={shown(value)}: policy.backend=dtensor supports only data and "
                f"tensor parallelism, and {_MEGATRON_ONLY[name]}. Set {key}.{name}="
                f"{shown(default)}, or policy.backend=megatron"
            )
