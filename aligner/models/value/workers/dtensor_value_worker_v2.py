"""`DTensorValueWorkerV2`, one process of a critic on a transformers model."""

from typing import Any

from aligner.compat.paths import published
from aligner.models.value.workers.value_worker import ValueWorker


class DTensorValueWorkerV2(ValueWorker):
    """Worker of `Value` on a transformers model, sharded by FSDP2."""

    model_path = "aligner.models.gpt.dtensor.critic:DTensorCriticModel"


def __getattr__(name: str) -> Any:  # other names that NeMo-RL's module has
    return published(__name__, name)
