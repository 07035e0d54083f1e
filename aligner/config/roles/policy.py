"""Models of policy and critic."""

from dataclasses import dataclass
from typing import Literal

from aligner.config.roles.model import TrainedModelConfig
from aligner.config.rules.peft import check_peft
from aligner.errors import ConfigError


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
