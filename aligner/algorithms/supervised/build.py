"""Assembling runs that learn from given examples: data, the role, the trainer."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from aligner.algorithms.run.assembly import (
    Assembled,
    Attempt,
    describe_model,
    dropped_note,
    launch_run,
    run_facts,
    run_to_the_end,
    total_steps,
)
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.engine import Engine
from aligner.algorithms.run.longest import longest_set
from aligner.algorithms.run.startup import (
    dropout_in_words,
    role_memory,
    saving,
    training_memory,
)
from aligner.algorithms.supervised.trainer import SupervisedTrainer, Task
from aligner.architecture import GPTArchitecture
from aligner.config import (
    BaseRunConfig,
    ExampleDataConfig,
    LoopConfig,
    PromptSourceConfig,
    SFTRunConfig,
    check_layout,
)
from aligner.config.rules.checks import check_longest_example, check_model_shares
from aligner.data.sampler import PromptSampler
from aligner.data.supervised import ExampleDataset, ExampleFormat, collate_examples
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.accelerator import DeviceFacts
from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.policy.lm_policy import Policy
from aligner.models.role_front import RoleFront
from aligner.observe.packages import find_packages
from aligner.observe.startup import StartupFacts, supervised_arithmetic


@dataclass(frozen=True)
class Lesson:
    """Parts in which one kind of supervised run differs from another.

    ``start``: the role that learns, given where its workers live and the updates it will make.
    ``ask_first``: the task again, with what is to be asked of the role while it has its initial
    weights, or of further models. ``longest``: tokens of the longest sequence. ``before_saving``:
    what is done to the role at the end of the run. ``frozen``: further models by name, which stand
    in the role's layout and read its sequences.
    """

    task: Task[Any]
    start: Callable[[Attempt, int], RoleFront]
    saved_as: str  # how the trained `.nemo` is called
    longest: int
    notes: list[str]
    ask_first: Callable[[Attempt, Any], Task[Any]] | None = None
    before_saving: Callable[[RoleFront], None] = lambda role: None
    frozen: Mapping[str, GPTArchitecture] = field(default_factory=dict)


@dataclass(frozen=True)
class _Inputs:
    architecture: GPTArchitecture
    lesson: Lesson


@may_be_dry
def train_sft(config: SFTRunConfig) -> None:
    """Fine-tune from start to end and print where everything is."""
    loop = config.trainer.sft

    def lesson(tokenizer: Tokenizer, architecture: GPTArchitecture) -> Lesson:
        data = config.data
        train = load_examples(data, data.train, tokenizer)
        validation = (
            None if data.validation is None else load_examples(data, data.validation, tokenizer)
        )
        longest = max(train.max_length, 0 if validation is None else validation.max_length)
        if config.dry_run:
            train, validation = longest_set(config, train, tokenizer, architecture), None
            longest = max(longest, train.max_length)
        check_longest_example(config, longest)
        return Lesson(
            Task(
                train,
                validation,
                lambda examples: collate_examples(examples, tokenizer.pad_id),
                NegativeLogLikelihoodLoss(),
            ),
            lambda attempt, updates: start_policy(config, loop, tokenizer, attempt, updates),
            "policy",
            longest,
            dropped_note(train.dropped_too_long, "training examples", "data.max_length"),
        )

    run_lesson(config, loop, loop.limit_val_examples, config.data.shuffle, lesson)


def start_policy(
    config: BaseRunConfig, loop: LoopConfig, tokenizer: Tokenizer, attempt: Attempt, updates: int
) -> Policy:
    """The policy that learns; no copy of its initial weights is kept."""
    return Policy(
        attempt.clusters.policy,
        config.model,
        tokenizer,
        run=run_facts(config, loop),
        backend=config.policy.backend,
        init_reference_model=False,
        max_optimizer_steps=updates,
    )


def load_examples(
    data: ExampleDataConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> ExampleDataset:
    """Read and tokenize one set of examples."""
    return ExampleDataset.load(
        source.source,
        tokenizer,
        ExampleFormat(
            prompt_column=data.prompt_column,
            response_column=data.response_column,
            messages_column=data.messages_column,
            tools_column=data.tools_column,
            chat=data.chat,
            system_prompt=data.system_prompt,
            add_bos=data.add_bos,
            learn=data.learn,
            max_length=data.max_length,
        ),
        arguments=source.arguments,
        limit=source.limit,
    )


def run_lesson(
    config: BaseRunConfig,
    loop: LoopConfig,
    limit_val_examples: int | None,
    shuffle: bool,
    lesson_of: Callable[[Tokenizer, GPTArchitecture], Lesson],
) -> None:
    """Run what ``lesson_of`` brings for the model's tokenizer and architecture.

    A step is one optimizer update.
    """

    def load(engine: Engine, closing: ExitStack) -> _Inputs:
        del closing  # nothing is open
        tokenizer, architecture = describe_model(config.model)
        world_size, _ = engine.worlds
        check_layout(architecture, config.model.parallel, world_size)
        check_model_shares(config, world_size)
        lesson = lesson_of(tokenizer, architecture)
        for frozen in lesson.frozen.values():
            check_layout(frozen, config.model.parallel, world_size)
        for reader in (architecture, *lesson.frozen.values()):
            _check_positions(reader, lesson.longest)
        return _Inputs(architecture, lesson)

    def run(inputs: _Inputs, attempt: Attempt) -> None:
        lesson = inputs.lesson
        sampler = PromptSampler(
            len(lesson.task.train),
            config.model.global_batch_size // lesson.task.rows_per_example,
            seed=config.seed,
            shuffle=shuffle,
        )
        steps = total_steps(loop, sampler)
        role = lesson.start(attempt, steps)
        attempt.closing.callback(role.shutdown)
        task = lesson.task if lesson.ask_first is None else lesson.ask_first(attempt, role)
        assembled = Assembled(
            SupervisedTrainer(role, task, sampler, limit_val_examples=limit_val_examples),
            loop,
            steps,
            layout=attempt.clusters.describe(config),
            trained=(lesson.saved_as, role),
            restores=["model", "optimizer", "schedule", "data position"],
            facts=lambda device, restored, notes: replace(
                _startup_facts(config, inputs, attempt, device, steps),
                restored=restored,
                notes=notes,
            ),
            notes=lesson.notes,
            before_saving=lambda: lesson.before_saving(role),
        )
        run_to_the_end(config, assembled, attempt)

    launch_run(config, load, run)


def _startup_facts(
    config: BaseRunConfig, inputs: _Inputs, attempt: Attempt, device: DeviceFacts, steps: int
) -> StartupFacts:
    """Facts for the start-up report of any such run."""
    lesson, architecture = inputs.lesson, inputs.architecture
    rows_per_example = lesson.task.rows_per_example
    processes = attempt.clusters.policy.world_size()
    data_size = config.model.parallel.data_size(processes)
    memory = [role_memory(config, architecture, data_size, "model")]
    memory += [
        role_memory(config, frozen, 1, name, trainable=False)
        for name, frozen in lesson.frozen.items()
    ]
    return StartupFacts(
        processes=processes,
        device=device,
        algorithm=config.algorithm,
        model=config.model.restore_from_path,
        log_dir=config.exp_manager.explicit_log_dir,
        batches=supervised_arithmetic(
            len(lesson.task.train),
            steps,
            config.model.global_batch_size // rows_per_example,
            config.model.micro_batch_size // rows_per_example,
            data_size,
        ),
        roles=memory,
        working_bytes=training_memory(config, architecture, lesson.longest, on_gpus=device.has_gpu),
        run_states=saving(config, memory, processes),
        packages=find_packages(),
        dropout=dropout_in_words(config.model, architecture),
    )


def _check_positions(architecture: GPTArchitecture, longest: int) -> None:
    positions = architecture.max_position_embeddings
    if longest > positions:
        raise ConfigError(
            f"the longest example has {longest} tokens and the model has {positions} positions; "
            f"set data.max_length={positions} to drop longer examples"
        )
