"""Supervised fine-tuning, and functions for all runs that learn from given examples."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from aligner.algorithms.run.directory import total_steps
from aligner.algorithms.run.dry_run import longest_set
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import dropped_note, role_memory, startup_summary
from aligner.algorithms.supervised.trainer import SupervisedTrainer, Task
from aligner.architecture import GPTArchitecture
from aligner.config import SFTRunConfig, SupervisedRunConfig, check_layout
from aligner.config.parse import refuse
from aligner.data.dataset import D, Dataset, PromptSampler, Split
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset, collate_examples, response_note
from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.observe.startup import StartupSummary, supervised_arithmetic


def train_sft(config: SFTRunConfig) -> None:
    """Fine-tune from start to end and print the paths of the run's files."""
    with Run.open(config) as run:
        config = run.config
        # Read and check the examples before the model is loaded.
        examples, longest = load_split(run, ExampleDataset)
        check_sequences(run, longest)
        task = Task(
            examples.train,
            examples.validation,
            partial(collate_examples, pad_id=run.tokenizer.pad_id),
            NegativeLogLikelihoodLoss(),
        )
        for attempt in run.attempts():
            with attempt:
                sampler, steps = example_sampler(config, examples.train)
                policy = attempt.start_policy(steps)
                limit = config.loop.limit_val_examples
                trainer = SupervisedTrainer(policy, task, sampler, limit_val_examples=limit)
                summary = supervised_summary(config, attempt, examples, steps, longest)
                with attempt.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


def load_split(
    run: Run[SupervisedRunConfig], kind: type[D], *other_models: GPTArchitecture
) -> tuple[Split[D], int]:
    """Read and tokenize the examples of a run, and return the maximum number of tokens, too.

    A dry run's examples have the maximum length. ``other_models`` also read the examples.
    """
    examples = Split.load(kind, run.config.data, run.tokenizer)
    longest = examples.max_length
    if not run.config.dry_run:
        return examples, longest
    train = longest_set(run.config, examples.train, run.tokenizer, run.architecture, *other_models)
    return Split(train), max(longest, train.max_length)


def check_sequences(
    run: Run[SupervisedRunConfig], longest: int, *other_models: GPTArchitecture
) -> None:
    """Raise if a model or a token budget has no room for sequences of ``longest`` tokens.

    ``other_models`` read the sequences and use the trained model's layout.
    """
    config = run.config
    refuse(config.length_problems(longest))
    for model in other_models:
        check_layout(model, config.model.parallel, run.world_size)
    for architecture in (run.architecture, *other_models):
        positions = architecture.max_position_embeddings
        if longest > positions:
            raise ConfigError(
                f"the longest example has {longest} tokens, but the model has {positions} "
                f"positions. Set data.max_length={positions} to drop longer examples"
            )


def example_sampler(config: SupervisedRunConfig, train: Dataset[Any]) -> tuple[PromptSampler, int]:
    """Return the sampler of each update's examples, and the number of updates of the run."""
    sampler = PromptSampler(
        len(train),
        config.model.global_batch_size // config.rows_per_example,
        seed=config.seed,
        shuffle=config.data.shuffle,
        may_change=config.exp_manager.data_may_change,
        shares=train.shares,
    )
    return sampler, total_steps(config, sampler)


def supervised_summary(
    config: SupervisedRunConfig,
    workers: Workers,
    examples: Split[D],
    steps: int,
    longest: int,
    frozen: Mapping[str, GPTArchitecture] | None = None,
) -> StartupSummary:
    """Return the start-up report of a run. ``frozen``: other models by name."""
    data_size = config.model.parallel.data_size(workers.clusters.policy.world_size())
    memory = [role_memory(config, workers.architecture, data_size, "model")]
    for name, architecture in (frozen or {}).items():
        memory.append(role_memory(config, architecture, 1, name, trainable=False))
    batches = supervised_arithmetic(
        len(examples.train),
        steps,
        config.model.global_batch_size // config.rows_per_example,
        config.model.micro_batch_size // config.rows_per_example,
        data_size,
    )
    restores = ["model", "optimizer", "schedule", "data position"]
    dropped = examples.train.dropped_too_long
    notes = [*examples.notes(), *dropped_note(dropped, "training examples", "data.max_length")]
    # In on-policy distillation the student samples the responses, so there are no examples to show.
    if not isinstance(examples.train, PromptDataset):
        train = examples.train
        rows = (example for n in range(len(train)) for example in train[n].examples)
        notes.append(response_note(rows, workers.tokenizer))
    return startup_summary(workers, batches, memory, longest, restores=restores, notes=notes)
