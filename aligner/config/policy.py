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


def check_policy_backend(backend: str, model: TrainedModelConfig) -> None:
    """Refuse layouts and adapters that a backend does not have, before anything is loaded."""
    check_peft(backend, model)
    if backend != "dtensor":
        return
    unknown = {
        "model.pipeline_model_parallel_size": (model.pipeline_model_parallel_size, 1),
        "model.context_parallel_size": (model.context_parallel_size, 1),
        "model.expert_model_parallel_size": (model.expert_model_parallel_size, 1),
        "model.sequence_parallel": (model.sequence_parallel, False),
        "model.fp8": (model.fp8, None),
    }
    for key, (value, supported) in unknown.items():
        if value != supported:
            raise ConfigError(
                f"{key}={_yaml(value)}: policy.backend=dtensor has data and tensor parallelism "
                f"alone, and no 8-bit products; set {key}={_yaml(supported)}, or "
                "policy.backend=megatron"
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
