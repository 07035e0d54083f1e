"""Training of a reward model from comparisons or ratings."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from aligner.algorithms.run.engine import Workers, run_settings
from aligner.algorithms.run.run import Run
from aligner.algorithms.supervised.build import load_split, train_supervised
from aligner.algorithms.supervised.trainer import ExampleSet, SupervisedTrainer, Task
from aligner.checkpoint.model_source import open_model
from aligner.config import RewardRunConfig
from aligner.data import preferences
from aligner.data.dataset import Dataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.gpt.role.reward import Standardization, saved_attributes
from aligner.models.reward.reward_model import RewardModel
from aligner.types import LossFunction


def train_reward_model(config: RewardRunConfig) -> None:
    """Train a reward model, and print the paths of the run's files."""
    with Run.open(config) as run:
        config, loop, pad_id = run.config, run.config.trainer.reward_model, run.tokenizer.pad_id
        check_head(config)
        examples, longest = load_split(run, kind_of(config))
        collate: Callable[..., BatchedDataDict] = partial(preferences.collate_pairs, pad_id=pad_id)
        loss: LossFunction = BradleyTerryLoss(loop.variant)
        if loop.loss == "regression":
            collate = partial(preferences.collate_rated, pad_id=pad_id)
            loss = AttributeRegressionLoss()
        task = Task[Any](examples.train, examples.validation, collate, loss)

        def start(workers: Workers, steps: int) -> tuple[RewardModel, Task[Any]]:
            model = RewardModel(
                workers.clusters.policy,
                config.model,
                run.tokenizer,
                run_settings(config, steps),
                attributes=config.data.attribute_columns,
                backend=config.policy.backend,
            )
            return workers.own(model), task

        make_trainer = partial(RewardModelTrainer, config=config)
        train_supervised(
            run, examples, longest, start, make_trainer=make_trainer, saved_as="reward_model"
        )


@dataclass(eq=False)
class RewardModelTrainer(SupervisedTrainer):
    """Trainer of a reward model. `save_model` also saves statistics of the rewards."""

    role: RewardModel
    _: KW_ONLY
    config: RewardRunConfig

    def save_model(self, path: str) -> None:
        """Write the model, the last token of its inputs, and statistics of its rewards."""
        loop, train = self.config.trainer.reward_model, self.task.train
        self.role.remember_sequences(self.config.data.add_bos, last_token(train))
        sets = {"train": train, "validation": self.task.validation, None: None}
        examples = sets[loop.standardize_on]
        if examples is not None:
            count, rewards = min(len(examples), loop.limit_standardize_examples), []
            self.role.prepare_for_inference()
            for start in range(0, count, 256):  # in batches of limited size
                part = [examples[index] for index in range(start, min(start + 256, count))]
                rewards.append(self.role.get_rewards(self.task.collate(part))["rewards"].cpu())
            self.role.finish_inference()
            spread = Standardization.measure(torch.cat(rewards))
            self.role.standardize(spread.mean, spread.std)
        self.role.save_checkpoint(path)


def kind_of(config: RewardRunConfig) -> type[Dataset[Any]]:
    """Return the class of data sets that the configured loss needs: pairs or ratings."""
    loop = config.trainer.reward_model
    if loop.loss == "regression":
        return preferences.RatedDataset
    return preferences.PairDataset if loop.variant == "plain" else preferences.OrderedPairDataset


def last_token(examples: ExampleSet[Any]) -> int | None:
    """Return the id of the token at the end of all sequences, or None if the ends differ."""
    items = (examples[index] for index in range(len(examples)))
    ends = {example.ids[-1] for item in items for example in item.examples}
    return ends.pop() if len(ends) == 1 else None


def check_head(config: RewardRunConfig) -> None:
    """Raise `ConfigError` if the model is a reward model with another number of attributes."""
    path, trusted = config.model.restore_from_path, config.model.trust_remote_code
    adapted = config.model.peft.lora is not None
    with open_model(path, config.policy.backend, adapted, trusted=trusted) as checkpoint:
        saved = saved_attributes(checkpoint)
    columns = config.data.attribute_columns
    if saved is not None and max(1, len(saved)) != max(1, len(columns)):
        raise ConfigError(
            f"model.restore_from_path={config.model.restore_from_path} is a reward model for "
            f"{list(saved) or 'comparisons'}, but data.attribute_columns={list(columns)}. Set the "
            "same number of columns, or start from a language model"
        )
