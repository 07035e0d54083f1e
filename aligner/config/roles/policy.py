"""Models of policy and critic."""

from dataclasses import dataclass
from typing import Literal

from aligner.config.roles.model import STAGE_KEYS, TrainedModelConfig
from aligner.errors import ConfigError


def check_peft(backend: str, model: TrainedModelConfig) -> None:
    """Refuse adapters where there are none, and settings of adapters without them."""
    peft = model.peft
    if peft.lora is None:
        if peft.restore_from_path is not None:
            raise ConfigError(
                f"model.peft.restore_from_path={peft.restore_from_path} names adapters, and "
                "model.peft.peft_scheme is null; set it to lora"
            )
        return
    if backend != "megatron":
        raise ConfigError(
            f"policy.backend={backend} trains all weights, and model.peft.peft_scheme=lora; set "
            "policy.backend=megatron, or model.peft.peft_scheme=null"
        )
    if not peft.lora.target_modules:
        raise ConfigError(
            "model.peft.lora_tuning.target_modules is empty, so nothing would be trained; give "
            "all, or some of attention_qkv, attention_dense, mlp_fc1 and mlp_fc2"
        )
    if peft.lora.adapter_dropout and model.activations_checkpoint_granularity == "full":
        raise ConfigError(
            f"model.peft.lora_tuning.adapter_dropout={peft.lora.adapter_dropout:g}: layers that "
            "are computed again (model.activations_checkpoint_granularity=full) no longer know "
            "their tokens; set it to 0, or activations_checkpoint_granularity to selective or null"
        )
    if model.fp8 is not None:
        raise ConfigError(
            f"model.fp8={model.fp8}: adapters sit on megatron-core's own linears, and 8-bit "
            "products are Transformer Engine's; set model.fp8=null, or "
            "model.peft.peft_scheme=null"
        )
    if model.layer_spec == "transformer_engine":
        raise ConfigError(
            "model.layer_spec=transformer_engine: adapters sit on megatron-core's own linears; set "
            "model.layer_spec=auto, or model.peft.peft_scheme=null"
        )


@dataclass(frozen=True)
class BackendConfig:
    """The library behind policy and critic."""

    backend: Literal["megatron", "dtensor"] = "megatron"
    """Library behind policy and critic.

    `megatron`: megatron-core, all layouts. `dtensor`: transformers' models, sharded by FSDP2 and
    tensor-parallel DTensors (docs/value_parity.md).
    """


def check_policy_backend(backend: str, model: TrainedModelConfig, section: str = "model") -> None:
    """Refuse layouts and adapters that a backend does not have, before anything is loaded.

    ``section``: where the layout stands.
    """
    check_peft(backend, model)
    _check_overlap(model, section)
    if backend != "dtensor":
        return
    whole: dict[str, tuple[object, str]] = {
        "pipeline_model_parallel_size": (1, "fits more layers by model.tensor_model_parallel_size"),
        **dict.fromkeys(STAGE_KEYS, (None, "has one stage")),
        "freeze_moe_router": (False, "has no experts"),
        "context_parallel_size": (
            1,
            "fits longer sequences by model.tensor_model_parallel_size and "
            "model.activations_checkpoint_granularity=full",
        ),
        "expert_model_parallel_size": (1, "holds every expert on every rank"),
        "sequence_parallel": (False, "splits layers alone"),
        "fp8": (None, "has no 8-bit products"),
        "layer_spec": ("auto", "has transformers' layers"),
        "overlap_grad_reduce": (False, "has FSDP2's overlap"),
        "overlap_param_gather": (False, "has FSDP2's overlap"),
    }
    if model.rollout.offload_gradients:
        raise ConfigError(
            f"{model.rollout_key}.offload_gradients=true: policy.backend=dtensor keeps no gradient "
            "buffers; set it to false"
        )
    for key, (supported, instead) in whole.items():
        value = getattr(model, key)
        if value != supported:
            raise ConfigError(
                f"{section}.{key}={_yaml(value)}: policy.backend=dtensor has data and tensor "
                f"parallelism alone, and {instead}; set {section}.{key}={_yaml(supported)}, or "
                "policy.backend=megatron, which has it"
            )


def _check_overlap(model: TrainedModelConfig, section: str) -> None:
    key = f"{section}.overlap_param_gather"
    if model.overlap_param_gather and not model.overlap_grad_reduce:
        raise ConfigError(
            f"{key}=true collects weights by the buckets that gradients are summed in; set "
            f"{section}.overlap_grad_reduce=true too, or {key}=false"
        )
    if model.overlap_param_gather and model.peft.lora is not None:
        raise ConfigError(
            f"{key}=true, and model.peft.peft_scheme=lora: adapters are too small to be worth it; "
            f"set {key}=false"
        )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
