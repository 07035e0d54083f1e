"""Distillation of a teacher into a student.

`TeacherTargets` adds the teacher's most likely tokens to a batch of the student:

offline     examples ──────────────────────────► teacher: top k of each learned token ─► loss
on-policy   prompts ─► student: a response each ─► teacher: top k of each token ───────► loss
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.algorithms.rollout.rollout import (
    VALIDATION_SEED_OFFSET,
    SingleResponses,
    prompts_batch,
)
from aligner.algorithms.run.engine import Workers, run_settings
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import check_room
from aligner.algorithms.supervised.build import load_split, train_supervised
from aligner.algorithms.supervised.trainer import Task
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.archive import path_given_by
from aligner.config import DistillRunConfig, PeftConfig, StudentConfig
from aligner.data.batches import collate_prompts
from aligner.data.dataset import Dataset, Split
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset, collate_examples
from aligner.data.tokenizers.tokenizer import Tokenizer, differing_token
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.errors import ConfigError
from aligner.losses.distillation import DistillationLoss
from aligner.models.handle import TRAINED_COLUMNS
from aligner.models.policy.lm_policy import Policy


@dataclass(frozen=True)
class TeacherTargets:
    """Function that adds the logits of the teacher's most likely tokens to a batch.

    ``top_k``: number of tokens per position. ``vocab_size``: number of tokens that teacher and
    student share. ``seed``: seed for sampling the student's responses to the batch's prompts, or
    None if the batch already contains responses.
    """

    teacher: Policy
    top_k: int
    vocab_size: int
    seed: int | None = None

    def __call__(self, student: Policy, batch: BatchedDataDict, consumed: int | None) -> None:
        """Add ``teacher_topk_logits`` and ``teacher_topk_indices``, [B, S, k] (`Task.complete`)."""
        if self.seed is not None:  # the student's responses replace the prompts
            seed = self.seed + (VALIDATION_SEED_OFFSET if consumed is None else 0)
            batch["sample_ids"] = batch["sample_ids"] + (consumed or 0)
            rollout = SingleResponses().collect(student, batch, seed=seed)
            batch.data = columns_of(rollout, TRAINED_COLUMNS).data
        self.teacher.prepare_for_lp_inference()
        topk = self.teacher.get_topk_logits(batch, self.top_k, self.vocab_size)
        batch["teacher_topk_logits"] = topk["topk_logits"].cpu()
        batch["teacher_topk_indices"] = topk["topk_indices"].cpu()
        self.teacher.finish_inference()


def train_distill(config: DistillRunConfig) -> None:
    """Distil a teacher into a student, and print the paths of the run's files."""
    with Run.open(config) as run:
        config, loop, tokenizer = run.config, run.config.trainer.distill, run.tokenizer
        architecture = check_teacher(config, tokenizer)
        vocab_size = min(run.architecture.vocab_size, architecture.vocab_size)
        if loop.top_k > vocab_size:
            raise ConfigError(
                f"trainer.distill.top_k={loop.top_k} is more than the {vocab_size} tokens that "
                f"student and teacher share. Set it to at most {vocab_size}"
            )
        kind: type[Dataset[Any]] = PromptDataset if loop.on_policy else ExampleDataset
        examples, longest = load_split(run, kind, architecture)
        if loop.on_policy:
            # Every model must have room for prompt and response.
            response = config.model.distill.length_params.max_length
            key = "model.distill.length_params.max_length"
            for model in (run.architecture, architecture):
                check_room(model, longest, key, response, limit_key="data.max_length")
            longest += response
        seed = config.seed if loop.on_policy else None

        def start(workers: Workers, steps: int) -> tuple[Policy, Task[Any]]:
            student = workers.start_policy(steps)
            # The teacher is in the student's processes, without optimizer.
            teacher = Policy(
                workers.clusters.policy,
                teacher_config(config),
                tokenizer,
                run=run_settings(config),
                name_prefix="teacher",
                init_optimizer=False,
                init_reference_model=False,
                backend=config.policy.backend,
            )
            targets = TeacherTargets(workers.own(teacher), loop.top_k, vocab_size, seed)
            return student, distill_task(config, examples, tokenizer.pad_id, targets)

        train_supervised(run, examples, longest, start, frozen={"teacher": architecture})


def distill_task(
    config: DistillRunConfig, examples: Split[Any], pad_id: int, targets: TeacherTargets
) -> Task[Any]:
    """Return the training task: examples, batches, loss and the teacher's ``targets``."""
    loop = config.trainer.distill

    def collate(items: Sequence[Any]) -> BatchedDataDict:
        if loop.on_policy:  # the student responds to the prompts
            return prompts_batch(collate_prompts(items, pad_id), 0)
        return collate_examples(items, pad_id)

    loss = DistillationLoss(loop.kl, loop.mixed_weight, loop.zero_outside_topk)
    return Task(examples.train, examples.validation, collate, loss, complete=targets)


def check_teacher(config: DistillRunConfig, tokenizer: Tokenizer) -> GPTArchitecture:
    """Return the teacher's architecture. Raises if its tokens differ from ``tokenizer``."""
    path = config.teacher.restore_from_path
    source = open_model(path, config.policy.backend, trusted=config.model.trust_remote_code)
    with path_given_by("teacher.restore_from_path"), source as checkpoint:
        architecture, teacher_tokenizer = checkpoint.architecture, checkpoint.tokenizer
    difference = differing_token(teacher_tokenizer, tokenizer)
    if difference is not None:
        raise ConfigError(
            f"teacher.restore_from_path={path} has another vocabulary than "
            f"model.restore_from_path={config.model.restore_from_path}: {difference}. Teacher and "
            "student must share a tokenizer. Choose a teacher of the student's model family"
        )
    return architecture


def teacher_config(config: DistillRunConfig) -> StudentConfig:
    """Return the student's configuration with the teacher's weights and micro-batch size."""
    return dataclasses.replace(
        config.model,
        restore_from_path=config.teacher.restore_from_path,
        micro_batch_size=config.teacher.micro_batch_size,
        peft=PeftConfig(),
    )
