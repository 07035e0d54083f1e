"""What policy and critic are built of."""

from dataclasses import dataclass
from typing import Literal

from aligner.config.model import TrainedModelConfig
from aligner.config.peft import check_peft
from aligner.errors import ConfigError


@dataclass(frozen=True)
class BackendConfig:
    """The library behind policy and critic."""

    # megatron: megatron-core's GPT, all layouts; dtensor: transformers' models, sharded by FSDP2
    # over data-parallel ranks and by DTensor over tensor-parallel ones.
    backend: Literal["megatron", "dtensor"] = "megatron"


def check_policy_backend(backend: str, model: TrainedModelConfig, section: str = "model") -> None:
    """Refuse layouts and adapters that a backend does not have, before anything is loaded.

    ``section``: where the layout stands.
    """
    check_peft(backend, model)
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
    }
    for key, (supported, instead) in whole.items():
        value = getattr(model, key)
        if value != supported:
            raise ConfigError(
                f"{section}.{key}={_yaml(value)}: policy.backend=dtensor has data and tensor "
                f"parallelism alone, and {instead}; set {section}.{key}={_yaml(supported)}, or "
                "policy.backend=megatron, which has it"
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
