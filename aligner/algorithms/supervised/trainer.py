"""Supervised training of a role: one optimizer update per step on a batch of a data set.

examples ─► next global batch ─► one update of the role with the loss ─► validate, save
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from aligner.algorithms.rollout.rollout import prefixed
from aligner.algorithms.run.loop import Learner, StepResult
from aligner.data.batches import PromptSampler
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.handle import RoleHandle
from aligner.observe.diagnostics import count_updates, idle_roles, update_metrics
from aligner.observe.metrics import PhaseTimers
from aligner.types import LossFunction

T_co = TypeVar("T_co", covariant=True)


class ExampleSet(Protocol[T_co]):
    """A data set that supports ``len`` and indexing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T_co: ...


@dataclass(frozen=True)
class Task(Generic[T_co]):
    """Training task of a model: examples, a function that collates examples, and a loss."""

    train: ExampleSet[T_co]
    validation: ExampleSet[T_co] | None
    collate: Callable[[Sequence[T_co]], BatchedDataDict]
    loss: LossFunction
    # Adds columns that models compute. Arguments: the trained model, a batch, and the number of
    # earlier training examples, or None in a validation.
    complete: Callable[[Any, BatchedDataDict, int | None], None] | None = None


@dataclass(eq=False)
class SupervisedTrainer(Learner):
    """Trainer of one model on a `Task`. ``sampler`` draws the examples of global batches."""

    role: RoleHandle
    task: Task[Any]
    sampler: PromptSampler
    _: KW_ONLY
    limit_val_examples: int | None = None
    consumed_samples: int = field(default=0, init=False)
    updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.roles = {"role": self.role}

    def step(self, step: int, timers: PhaseTimers) -> StepResult:
        """Execute one optimizer update on the next global batch."""
        with timers("data"):
            indices = self.sampler.next_batch()
            batch = self.task.collate([self.task.train[index] for index in indices])
        with timers("complete"):
            self._complete(batch, self.consumed_samples)
        with timers("train"):
            self.role.prepare_for_training()
            result = self.role.train(batch, self.task.loss)
            self.role.finish_training()
        # Counters are part of run states.
        self.consumed_samples += len(indices)
        self.updates += count_updates([result])
        return StepResult(
            {
                **prefixed("train_optim", update_metrics([result])),
                "train_optim/optimizer_steps": self.updates,
                "train_data/tokens": int(batch["input_lengths"].sum()),
                "train_data/learned_tokens": int(batch["token_mask"].sum()),
                "progress/epoch": self.sampler.epoch,
                "progress/consumed_samples": self.consumed_samples,
            },
            idle_roles=idle_roles(model=[result]),
        )

    def validate(self, step: int, timers: PhaseTimers) -> StepResult:
        """Compute loss and metrics as means over all tokens (or pairs) of validation examples."""
        examples = self.task.validation
        if examples is None:
            return StepResult({})
        count = min(len(examples), self.limit_val_examples or len(examples))
        with timers("validate"):
            batch = self.task.collate([examples[index] for index in range(count)])
            self.role.prepare_for_inference()
            self._complete(batch, None)
            # Every data-parallel rank needs the same number of rows per pass.
            ranks = self.role.sharding_annotations.get_axis_size("data_parallel")
            batch = _padded(batch, self.role.config.micro_batch_size * ranks)
            result = self.role.train(batch, self.task.loss, eval_mode=True, gbs=batch.size)
            self.role.finish_inference()
        metrics = {name: values[0] for name, values in result["all_mb_metrics"].items()}
        return StepResult(prefixed("val_optim", metrics))

    def _complete(self, batch: BatchedDataDict, consumed: int | None) -> None:
        if self.task.complete is not None:
            self.task.complete(self.role, batch, consumed)


def _padded(batch: BatchedDataDict, multiple: int) -> BatchedDataDict:
    """Add masked rows to ``batch``, up to a multiple of ``multiple`` rows."""
    missing = -batch.size % multiple
    if not missing:
        return batch
    repeats = -(-missing // batch.size)
    filler: BatchedDataDict = BatchedDataDict.from_batches([batch] * repeats).slice(0, missing)
    filler["sample_mask"] = filler["sample_mask"] * 0
    return BatchedDataDict.from_batches([batch, filler])
