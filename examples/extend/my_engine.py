"""A rollout engine that answers every prompt with the same tokens.

    python examples/train_gpt_reinforce.py --config-name recipes/grpo_tiny_cpu \
        generation.backend=examples/extend/my_engine.py:FixedAnswers \
        generation.kwargs.answer=[50,51]
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aligner.config import EngineConfig, EngineStart, SamplingOptions
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import GenerationInterface
from aligner.refit.segments import accept


@dataclass(frozen=True)
class FixedAnswers(EngineConfig):
    """Settings of the engine, with the keys `generation.kwargs.*`."""

    answer: tuple[int, ...] = (48,)
    """Tokens of every answer."""

    probability: float = 0.5
    """Probability that the engine returns for each token."""

    def engine_problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse empty answers, and answers longer than `length_params.max_length`."""
        longest = run.model.rollout.length_params.max_length
        if not 0 < len(self.answer) <= longest:
            yield f"{key}.answer: {len(self.answer)} tokens. Give 1 to {longest}"

    def start(self, arguments: EngineStart) -> "FixedGeneration":
        """Start the engine."""
        return FixedGeneration(self, arguments)


class FixedGeneration(GenerationInterface):
    """Handle of the engine. ``weights``: the policy's weights by their Hugging Face names."""

    def __init__(self, settings: FixedAnswers, arguments: EngineStart) -> None:
        self._settings, self._policy = settings, arguments.policy
        self._tokenizer = arguments.tokenizer
        self.weights: dict[str, torch.Tensor] = {}
        self._is_stale = True

    def weights_changed(self) -> None:
        """Mark the weights as stale."""
        self._is_stale = True

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Fetch the policy's weights if they have changed, a group of tensors at a time."""
        if self._is_stale:
            self._policy.offload_before_refit()
            for names in self._policy.prepare_weights_for_ipc():
                handles = self._policy.get_weights_ipc_handles(names)
                self.weights |= {name: tensor.clone() for name, tensor in accept(handles)}
            self._policy.offload_after_refit()
            self._is_stale = False
        return True

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """Continue the prompts. See `GenerationOutputSpec`."""
        answer, starts = torch.tensor(self._settings.answer), data["input_lengths"]
        rows, count = len(starts), len(answer)
        ids = torch.full((rows, int(starts.max()) + count), self._tokenizer.pad_id)
        logprobs = torch.zeros(ids.shape)
        for row, start in enumerate(starts.tolist()):
            ids[row, :start] = data["input_ids"][row, :start]
            ids[row, start : start + count] = answer
            logprobs[row, start : start + count] = math.log(self._settings.probability)
        return BatchedDataDict(
            {
                "output_ids": ids,
                "generation_lengths": torch.full((rows,), count),
                "unpadded_sequence_lengths": starts + count,
                "logprobs": logprobs,
                "is_end": torch.ones(rows, dtype=torch.bool),
            }
        )

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release no resources."""
        return True
