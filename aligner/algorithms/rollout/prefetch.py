"""Rollouts of the training prompts: sampled when a step needs them, or one step ahead.

One ahead (asynchronous, one step off-policy)::

    step k     take rollout k, refit, begin rollout k+1 ─── score, train on rollout k
    engines                           └─ sample rollout k+1 with the weights before that training ─┐
    step k+1   take rollout k+1, refit, begin rollout k+2 ...                                  ◄─┘

Between the two, a validation or a run state may come: a rollout in flight is then drained, that is
finished with its old weights, or abandoned and sampled again, with the new ones, by the step that
takes it. Either way nothing depends on how far it had come, so a run that is resumed from that
state, and one that went on, see the same rollouts.

Conversations go through many rounds of the engine and their environments: a thread conducts those
of the next rollout, all with the weights from before. Only engines on Ray work while the policy
trains, and there one process drives, so the thread takes part in no collective operation.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from aligner.algorithms.rollout.rollout import generate, prompts_batch, rollout_of
from aligner.algorithms.rollout.trajectories import ConversationSource
from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.data.dataset import PromptSampler
from aligner.data.prompts import PromptDataset, collate_prompts
from aligner.errors import ConfigError
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
        environments: those that the policy converses with; None: a rollout is single responses.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        generation: GenerationInterface,
        prompts: PromptDataset,
        sampler: PromptSampler,
        pad_id: int,
        environments: ConversationSource | None = None,
    ) -> None:
        self.environments = environments
        self._ahead = config.generation.async_rollouts
        self._abandons = config.generation.in_flight == "abandon"
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
        """The next rollout (`rollout.rollout.generate`); begins the one after it.

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
            output = self._sampled(data)
        if self._ahead and more:
            self._begin(first_sample_id + data.size)
        if self.environments is None:
            return rollout_of(data, output)
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
        """Inverse of `state_dict`."""
        indices, output = state["indices"], state["output"]
        self._indices = None if indices is None else list(indices)
        self._output = None if output is None else BatchedDataDict(output)
        self._pending = None

    def _sampled(self, data: BatchedDataDict) -> BatchedDataDict:
        """Responses to the prompts of `_data`, or whole conversations."""
        if self.environments is None:
            return generate(self._generation, data, seed=self._seed)
        return self.environments.collect(
            self._generation, data, seed=self._seed, per_prompt=self._per_prompt
        )

    def _begin(self, first_sample_id: int) -> None:
        if not isinstance(self._generation, BackgroundGeneration):
            raise ConfigError(
                "generation.async_rollouts=true: this engine cannot draw while the policy trains; "
                "set generation.backend=vllm"
            )
        self._indices = self._sampler.next_batch()
        self._generation.prepare_for_generation()
        data = self._data(self._indices, first_sample_id)
        if self.environments is None:
            self._pending = self._generation.generate_in_background(data, seed=self._seed)
        else:
            self._pending = ConversationsAhead(
                self.environments, self._generation, data, self._seed, self._per_prompt
            )

    def _finish(self) -> None:
        if self._pending is not None:
            self._output = self._pending.result().to("cpu")
            self._pending = None

    def _data(self, indices: list[int], first_sample_id: int) -> BatchedDataDict:
        prompts = collate_prompts([self._prompts[index] for index in indices], self.pad_id)
        return prompts_batch(prompts, first_sample_id, self._per_prompt)


class ConversationsAhead:
    """Conversations that a thread conducts while the policy trains (`PendingGeneration`)."""

    def __init__(
        self,
        environments: ConversationSource,
        generation: BackgroundGeneration,
        data: BatchedDataDict,
        seed: int,
        per_prompt: int,
    ) -> None:
        """Begin `EnvironmentRollouts.collect`; ``generation`` has the weights that it samples with.

        Until `result` or `abandon` returns, nobody else may call it or the environments.
        """
        self._abandoned = Event()
        rounds = _Rounds(generation, self._abandoned)
        thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")
        self._future = thread.submit(
            environments.collect, rounds, data, seed=seed, per_prompt=per_prompt
        )
        thread.shutdown(wait=False)

    def result(self) -> BatchedDataDict:
        """Wait for all of them; what `EnvironmentRollouts.collect` raised is raised."""
        return self._future.result()

    def abandon(self) -> None:
        """End them after the round that is under way; an error of theirs is nobody's any more."""
        self._abandoned.set()
        self._future.exception()


class _AbandonedError(Exception):
    """The rollout will not be taken."""


class _Rounds(GenerationInterface):
    """An engine that works while the policy trains: its weights stay those it has."""

    def __init__(self, engine: BackgroundGeneration, abandoned: Event) -> None:
        self._engine, self._abandoned = engine, abandoned

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing: newer weights may be there already, which are the next rollout's."""
        return True

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """A round of a training rollout, which has the engine's own options and a seed."""
        assert seed is not None
        assert (greedy, sampling_options) == (False, None)
        if self._abandoned.is_set():
            raise _AbandonedError
        return self._engine.generate_in_background(data, seed=seed).result()

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing: the engine goes on to the next rollout."""
        return True
