"""Arguments of a vLLM engine of the tiny model, for tests in which nothing of vLLM runs."""

from typing import Any

from aligner.config import LengthParams, SamplingParams
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.generation.vllm.engine import EngineArguments
from aligner.generation.vllm.settings import VllmConfig


def engine_arguments(settings: VllmConfig, **changes: Any) -> EngineArguments:
    given = {"architecture": TINY_ARCHITECTURE, "precision": "bf16", "eos_ids": [0]}
    given |= {"length": LengthParams(), "sampling": SamplingParams()}
    given |= {"max_batch_size": 2, "max_sequence_length": 8}
    return EngineArguments(settings=settings, **{**given, **changes})
