"""Assembling distillation: the data, the teacher, the loss."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from aligner.algorithms.distill.distillation import Teaching
from aligner.algorithms.rollout.rollout import prompts_batch
from aligner.algorithms.run.assembly import Attempt, dropped_note, run_facts
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.longest import longest_set
from aligner.algorithms.run.startup import check_room
from aligner.algorithms.supervised.build import Lesson, load_examples, run_lesson, start_policy
from aligner.algorithms.supervised.trainer import Task
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.nemo.archive import named_by
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import DistillRunConfig, PeftConfig, PromptSourceConfig, StudentConfig
from aligner.config.rules.checks import check_longest_example
from aligner.data.collate import collate_prompts
from aligner.data.prompts import PromptDataset, PromptFormat
from aligner.data.supervised import ExampleDataset, collate_examples
from aligner.data.tokenizers.tokenizer import Tokenizer, differing_token
from aligner.errors import ConfigError
from aligner.losses.distillation import DistillationLoss
from aligner.models.policy.lm_policy import Policy


@may_be_dry
def train_distill(config: DistillRunConfig) -> None:
    """Distil from start to end and print where everything is."""
    loop = config.trainer.distill

    def lesson(tokenizer: Tokenizer, student: GPTArchitecture) -> Lesson:
        teacher = check_teacher(config, tokenizer)
        vocab_size = min(student.vocab_size, teacher.vocab_size)
        if loop.top_k > vocab_size:
            raise ConfigError(
                f"trainer.distill.top_k={loop.top_k} is more than the {vocab_size} tokens that "
                "student and teacher share; lower it"
            )
        train = load_taught(config, config.data.train, tokenizer)
        sets = [train]
        if config.data.validation is not None:
            sets.append(load_taught(config, config.data.validation, tokenizer))
        longest = max(each.max_length for each in sets)
        if config.dry_run:
            sets = [longest_set(config, train, tokenizer, student, teacher)]
            longest = max(longest, sets[0].max_length)
        if loop.on_policy:
            response = config.model.distill.length_params.max_length
            key = "model.distill.length_params.max_length"
            for each in (student, teacher):
                check_room(each, longest, key, response, limit_key="data.max_length")
            longest += response
        check_longest_example(config, longest)
        task = distill_task(config, sets, tokenizer.pad_id, None)

        def with_teacher(attempt: Attempt, role: Any) -> Task[Any]:
            del role  # it is asked batch by batch
            front = start_teacher(config, tokenizer, attempt)
            seed = config.seed if loop.on_policy else None
            teaching = Teaching(front, loop.top_k, vocab_size, seed)
            return distill_task(config, sets, tokenizer.pad_id, teaching)

        return Lesson(
            task,
            lambda attempt, updates: start_policy(config, loop, tokenizer, attempt, updates),
            "policy",
            longest,
            dropped_note(train.dropped_too_long, "training examples", "data.max_length"),
            ask_first=with_teacher,
            frozen={"teacher": teacher},
        )

    run_lesson(config, loop, loop.limit_val_examples, config.data.shuffle, lesson)


def load_taught(
    config: DistillRunConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> ExampleDataset | PromptDataset:
    """Read and tokenize one set of examples, or of prompts that the student responds to."""
    data = config.data
    if not config.trainer.distill.on_policy:
        return load_examples(data, source, tokenizer)
    prompt_format = PromptFormat(
        prompt_column=data.prompt_column,
        ground_truth_column=None,
        tools_column=data.tools_column,
        chat=data.chat,
        system_prompt=data.system_prompt,
        add_bos=data.add_bos,
        max_prompt_length=data.max_length,
    )
    return PromptDataset.load(
        source.source,
        tokenizer,
        prompt_format,
        arguments=source.arguments,
        limit=source.limit,
        limit_key="max_length",
    )


def distill_task(
    config: DistillRunConfig, sets: Sequence[Any], pad_id: int, teaching: Teaching | None
) -> Task[Any]:
    """Task of learning from the training set and, where there is one, the validation set.

    ``teaching``: None until the teacher has been started.
    """
    loop = config.trainer.distill
    return Task(
        sets[0],
        sets[1] if len(sets) > 1 else None,
        (lambda prompts: prompts_batch(collate_prompts(prompts, pad_id), 0))
        if loop.on_policy
        else (lambda examples: collate_examples(examples, pad_id)),
        DistillationLoss(loop.kl, loop.mixed_weight, loop.zero_outside_topk),
        complete=teaching,
    )


def check_teacher(config: DistillRunConfig, tokenizer: Tokenizer) -> GPTArchitecture:
    """The teacher's architecture; its tokens must be the student's."""
    path = config.teacher.restore_from_path
    with named_by("teacher.restore_from_path"), open_nemo(path) as checkpoint:
        architecture, own = checkpoint.architecture, checkpoint.tokenizer
    difference = differing_token(own, tokenizer)
    if difference is not None:
        raise ConfigError(
            f"teacher.restore_from_path={path} has another vocabulary than "
            f"model.restore_from_path={config.model.restore_from_path}: {difference}. What a "
            "teacher says of a token means nothing to such a student; take a teacher and a student "
            "of one family"
        )
    return architecture


def teacher_config(config: DistillRunConfig) -> StudentConfig:
    """The teacher as a model of the run: the student's layout, packing and temperature."""
    return dataclasses.replace(
        config.model,
        restore_from_path=config.teacher.restore_from_path,
        micro_batch_size=config.teacher.micro_batch_size,
        peft=PeftConfig(),
    )


def start_teacher(config: DistillRunConfig, tokenizer: Tokenizer, attempt: Attempt) -> Policy:
    """The teacher beside the student: without optimizer, and ended with ``attempt``."""
    teacher = Policy(
        attempt.clusters.policy,
        teacher_config(config),
        tokenizer,
        run=run_facts(config, config.trainer.distill),
        name_prefix="teacher",
        init_optimizer=False,
        init_reference_model=False,
    )
    attempt.closing.callback(teacher.shutdown)
    return teacher
