"""Supervised fine-tuning, and functions for all runs that learn from given examples."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aligner.algorithms.run.directory import sampler_and_steps
from aligner.algorithms.run.dry_run import longest_set
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import dropped_note, role_memory, startup_summary
from aligner.algorithms.supervised.trainer import SupervisedTrainer, Task
from aligner.architecture import GPTArchitecture
from aligner.config import SFTRunConfig, SupervisedRunConfig, check_layout
from aligner.config.parse import refuse
from aligner.data.dataset import D, Split
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset, collate_examples, response_note
from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.handle import RoleHandle
from aligner.observe.startup import StartupSummary, supervised_arithmetic


def train_sft(config: SFTRunConfig) -> None:
    """Fine-tune a model on examples, and print the paths of the run's files."""
    with Run.open(config) as run:
        examples, longest = load_split(run, ExampleDataset)
        collate = partial(collate_examples, pad_id=run.tokenizer.pad_id)
        task = Task(examples.train, examples.validation, collate, NegativeLogLikelihoodLoss())
        train_supervised(
            run, examples, longest, lambda workers, steps: (workers.start_policy(steps), task)
        )


def train_supervised(
    run: Run[SupervisedRunConfig],
    examples: Split[D],
    longest: int,
    start: Callable[[Workers, int], tuple[RoleHandle, Task[Any]]],
    *,
    frozen: Mapping[str, GPTArchitecture] | None = None,
    make_trainer: Callable[..., SupervisedTrainer] = SupervisedTrainer,
    saved_as: str = "policy",
) -> None:
    """Check lengths, start the workers, train one model on a task, and write model and report.

    Args:
        run: the opened run.
        examples: training and validation examples.
        longest: length of the longest sequence, in tokens.
        start: starts the models, given the workers and the number of optimizer steps. Returns the
            trained model and its task.
        frozen: architectures of models that are not trained. Keys are their names.
        make_trainer: class of the trainer.
        saved_as: file name of the trained model, without suffix.
    """
    config, frozen = run.config, frozen or {}
    # All models have the same parallel layout, and must have positions for the longest sequence.
    refuse(config.length_problems(longest))
    for architecture in frozen.values():
        check_layout(architecture, config.model.parallel, run.engine.worlds[0])
    positions = min(model.max_position_embeddings for model in (run.architecture, *frozen.values()))
    if longest > positions:
        raise ConfigError(
            f"the longest example has {longest} tokens, but the model has {positions} "
            f"positions. Set data.max_length={positions} to drop longer examples"
        )
    for attempt in run.attempts():
        with attempt as workers:
            rows = config.model.global_batch_size // config.rows_per_example
            sampler, steps = sampler_and_steps(config, examples.train, rows)
            role, task = start(workers, steps)
            limit = config.loop.limit_val_examples
            trainer = make_trainer(role, task, sampler, limit_val_examples=limit)
            summary = _summary(config, workers, examples, steps, longest, frozen)
            with workers.loop(trainer, steps, summary, saved_as=saved_as) as run_loop:
                run_loop.run()


def load_split(
    run: Run[SupervisedRunConfig], kind: type[D], *other_models: GPTArchitecture
) -> tuple[Split[D], int]:
    """Load examples (`longest_set` in a dry run). Also return the longest length in tokens."""
    examples = Split.load(kind, run.config.data, run.tokenizer)
    longest = examples.max_length
    if not run.config.dry_run:
        return examples, longest
    train = longest_set(run.config, examples.train, run.tokenizer, run.architecture, *other_models)
    return Split(train), max(longest, train.max_length)


def _summary(
    config: SupervisedRunConfig,
    workers: Workers,
    examples: Split[D],
    steps: int,
    longest: int,
    frozen: Mapping[str, GPTArchitecture],
) -> StartupSummary:
    data_size = config.model.parallel.data_size(workers.clusters.policy.world_size())
    memory = [role_memory(config, workers.architecture, data_size, "model")]
    for name, architecture in frozen.items():
        memory.append(role_memory(config, architecture, 1, name, trainable=False))
    model, rows = config.model, config.rows_per_example
    sizes = (model.global_batch_size // rows, model.micro_batch_size // rows)
    batches = supervised_arithmetic(len(examples.train), steps, *sizes, data_size)
    restores = ["model", "optimizer", "schedule", "data position"]
    dropped = examples.train.dropped_too_long
    notes = [*examples.notes(), *dropped_note(dropped, "training examples", "data.max_length")]
    # In on-policy distillation the student samples the responses, so there are no examples to show.
    if not isinstance(examples.train, PromptDataset):
        train = examples.train
        shown = (example for n in range(len(train)) for example in train[n].examples)
        notes.append(response_note(shown, workers.tokenizer))
    return startup_summary(workers, batches, memory, longest, restores=restores, notes=notes)
