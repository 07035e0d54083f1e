"""Assembling a run that trains a reward model: from comparisons, or from ratings."""

from typing import Any

import torch

from aligner.algorithms.preference.build import load_pairs, single_format
from aligner.algorithms.run.assembly import dropped_note, run_facts
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.longest import longest_set
from aligner.algorithms.supervised.build import Lesson, run_lesson
from aligner.algorithms.supervised.trainer import Examples, Task
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.config import PromptSourceConfig, RewardRunConfig
from aligner.config.rules.checks import check_longest_example
from aligner.data.preferences import Pair, PairDataset, collate_pairs
from aligner.data.ratings import RatedDataset, collate_rated
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.gpt.megatron.reward import Standardization, saved_attributes
from aligner.models.reward.reward_model import RewardModel
from aligner.models.role_front import RoleFront

Dataset = PairDataset | RatedDataset


@may_be_dry
def train_reward_model(config: RewardRunConfig) -> None:
    """Train from start to end and print where everything is."""
    loop = config.trainer.reward_model
    data = config.data

    def lesson(tokenizer: Tokenizer, architecture: GPTArchitecture) -> Lesson:
        check_head(config)
        train = load_judged(config, data.train, tokenizer)
        validation = (
            None if data.validation is None else load_judged(config, data.validation, tokenizer)
        )
        longest = max(train.max_length, 0 if validation is None else validation.max_length)
        if config.dry_run:
            train, validation = longest_set(config, train, tokenizer, architecture), None
            longest = max(longest, train.max_length)
        check_longest_example(config, longest)
        task = _task(config, train, validation, tokenizer.pad_id)

        def start(attempt: Any, updates: int) -> RoleFront:
            return RewardModel(
                attempt.clusters.policy,
                config.model,
                tokenizer,
                run_facts(config, loop),
                attributes=data.attribute_columns,
                max_optimizer_steps=updates,
            )

        def finish(role: RoleFront) -> None:
            assert isinstance(role, RewardModel)
            role.remember_sequences(data.add_bos, last_token(train))
            measured_on = {"train": train, "validation": validation, None: None}
            judged = measured_on[loop.standardize_on]
            if judged is not None:
                found = measure(role, task, judged, loop.limit_standardize_examples)
                role.standardize(found.mean, found.std)

        return Lesson(
            task,
            start,
            "reward_model",
            longest,
            dropped_note(train.dropped_too_long, "training examples", "data.max_length"),
            before_saving=finish,
        )

    run_lesson(config, loop, loop.limit_val_examples, data.shuffle, lesson)


def load_judged(
    config: RewardRunConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> Dataset:
    """Read and tokenize one set of comparisons, or of ratings."""
    data = config.data
    if config.trainer.reward_model.loss == "regression":
        return RatedDataset.load(
            source.source,
            tokenizer,
            single_format(data),
            data.attribute_columns,
            arguments=source.arguments,
            limit=source.limit,
        )
    strength_counts = config.trainer.reward_model.variant != "plain"
    return load_pairs(data, source, tokenizer, rewards_in_order=strength_counts)


def last_token(examples: Dataset) -> int | None:
    """The token that ends every sequence; None where they end in several."""
    items: list[Any] = [examples[index] for index in range(len(examples))]
    sequences = [item.examples if isinstance(item, Pair) else (item.example,) for item in items]
    ends = {example.ids[-1] for pair in sequences for example in pair}
    return ends.pop() if len(ends) == 1 else None


def _task(
    config: RewardRunConfig, train: Examples[Any], validation: Examples[Any] | None, pad_id: int
) -> Task[Any]:
    loop = config.trainer.reward_model
    if loop.loss == "regression":
        return Task(
            train,
            validation,
            lambda rated: collate_rated(rated, pad_id),
            AttributeRegressionLoss(),
        )
    return Task(
        train,
        validation,
        lambda pairs: collate_pairs(pairs, pad_id),
        BradleyTerryLoss(loop.variant),
        rows_per_example=config.rows_per_example,
    )


def measure(
    model: RewardModel, task: Task[Any], examples: Examples[Any], limit: int
) -> Standardization:
    """Mean and standard deviation of the rewards of the first ``limit`` examples' sequences."""
    count = min(len(examples), limit)
    model.prepare_for_inference()
    rewards = []
    for start in range(0, count, 256):  # a few at a time, so that no batch is too big
        part = [examples[index] for index in range(start, min(start + 256, count))]
        rewards.append(model.get_rewards(task.collate(part))["rewards"].cpu())
    model.finish_inference()
    return Standardization.measure(torch.cat(rewards))


def check_head(config: RewardRunConfig) -> None:
    """Refuse to go on from a reward model that rates something else."""
    with open_model(config.model.restore_from_path) as checkpoint:
        known = saved_attributes(checkpoint)
    wanted = config.data.attribute_columns
    if known is not None and max(1, len(known)) != max(1, len(wanted)):
        raise ConfigError(
            f"model.restore_from_path={config.model.restore_from_path} is a reward model that "
            f"rates {list(known) or 'comparisons'}, and data.attribute_columns={list(wanted)}; "
            "name as many columns, or start from a language model"
        )
