"""Rollouts of the training prompts: sampled when a step needs them, or one step ahead.

One ahead (asynchronous, one step off-policy)::

    step k     take rollout k, refit, begin rollout k+1 ─── score, train on rollout k
    engines                           └─ sample rollout k+1 with the weights before that training ─┐
    step k+1   take rollout k+1, refit, begin rollout k+2 ...                                  ◄─┘

Between the two, a validation or a run state may come: a rollout in flight is then drained, that is
finished with its old weights, or abandoned and sampled again, with the new ones, by the step that
takes it. Either way nothing depends on how far it had come, so a run that is resumed from that
state, and one that went on, see the same rollouts.
"""

from collections.abc import Mapping
from typing import Any

from aligner.algorithms.rollout.ahead import ConversationsAhead
from aligner.algorithms.rollout.rollout import (
    RolloutSource,
    SingleTurn,
    prompts_batch,
    rollout_of,
)
from aligner.config import SamplingRunConfig
from aligner.data.dataset import PromptSampler
from aligner.data.prompts import PromptDataset, collate_prompts
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration

# Columns that the indices of a rollout bring back, and whose values a run state may not take.
_OF_THE_DATA = ("ground_truths", "columns")


class Rollouts:
    """The training rollouts of a run, in the sampler's order.

    Args:
        config: of the run; ``generation`` decides whether one is prefetched.
        generation: the engine.
        prompts: the training prompts.
        sampler: draws the prompts of one rollout at a time; belongs to the caller, too.
        pad_id: fills prompts on the right.
        source: of rollouts; None: a response to each prompt.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        generation: GenerationInterface,
        prompts: PromptDataset,
        sampler: PromptSampler,
        pad_id: int,
        source: RolloutSource | None = None,
    ) -> None:
        self.source = source or SingleTurn()
        self._ahead = config.generation.async_rollouts
        self._abandons = config.generation.in_flight == "abandon"
        self._changes = config.exp_manager.resume_changed + config.exp_manager.accept_changed
        self._seed = config.seed
        self._per_prompt = config.model.rollout.num_rollouts_per_prompt
        self._generation = generation
        self._prompts, self._sampler, self.pad_id = prompts, sampler, pad_id
        # The rollout that was begun for the next step: its prompts, and what there is of it.
        self._indices: list[int] | None = None
        self._pending: PendingGeneration | None = None
        self._output: BatchedDataDict | None = None

    def take(
        self, first_sample_id: int, *, more: bool, prompts: int | None = None
    ) -> BatchedDataDict:
        """The next rollout (`RolloutSource.collect`); begins the one after it.

        ``first_sample_id``: of its first row. ``more``: another step will follow. ``prompts``: how
        many, where none was begun ahead; default what the sampler draws at a time.
        """
        self._finish()
        indices, output = self._indices, self._output
        self._indices = self._output = None
        if indices is None:
            indices = self._sampler.next_batch(prompts)
        data = self._data(indices, first_sample_id)
        if output is None:
            output = self.source.collect(
                self._generation, data, seed=self._seed, per_prompt=self._per_prompt
            )
        elif "output_ids" in output:  # of a run state that has what the engine gave
            output = rollout_of(data, output)
        if self._ahead and more:
            self._begin(first_sample_id + data.size)
        return BatchedDataDict({**output, **{name: data[name] for name in _OF_THE_DATA}})

    def drain(self) -> None:
        """Have nothing in flight: finish it or abandon it, as configured."""
        if self._pending is not None and self._abandons:
            self._pending.abandon()
            self._pending = None
        self._finish()

    def close(self) -> None:
        """End conversations in flight: their environments outlive the workers that sampled."""
        if isinstance(self._pending, ConversationsAhead):
            self._pending.abandon()
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """The prompts that the sampler has given out but no step has had, and their responses."""
        self.drain()
        output = None
        if self._output is not None:
            output = {
                name: column for name, column in self._output.items() if name not in _OF_THE_DATA
            }
        return {"indices": self._indices, "output": output}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; if settings may have changed, responses are sampled again."""
        indices, output = state["indices"], state["output"]
        if self._changes:
            output, indices = None, indices if max(indices or [0]) < len(self._prompts) else None
        self._indices = None if indices is None else list(indices)
        self._output = None if output is None else BatchedDataDict(output)
        self._pending = None

    def _begin(self, first_sample_id: int) -> None:
        assert isinstance(self._generation, BackgroundGeneration), "see `EngineConfig.draws_ahead`"
        self._indices = self._sampler.next_batch()
        self._generation.prepare_for_generation()
        data = self._data(self._indices, first_sample_id)
        self._pending = self.source.begin(
            self._generation, data, seed=self._seed, per_prompt=self._per_prompt
        )

    def _finish(self) -> None:
        if self._pending is not None:
            self._output = self._pending.result()
            self._pending = None

    def _data(self, indices: list[int], first_sample_id: int) -> BatchedDataDict:
        prompts = collate_prompts([self._prompts[index] for index in indices], self.pad_id)
        return prompts_batch(prompts, first_sample_id, self._per_prompt)
