"""The longest batch that a run can meet, of random tokens; what a dry run learns from.

Everything else about its items (labels, ratings, columns) is that of the run's own data.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from aligner.architecture import GPTArchitecture
from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.config import BaseRunConfig
from aligner.config.rules.lengths import longest_lengths
from aligner.config.run import SamplingRunConfig, SupervisedRunConfig
from aligner.data.dataset import Dataset
from aligner.data.labelled import Labelled
from aligner.data.preferences import Pair
from aligner.data.prompts import Prompt
from aligner.data.ratings import Rated
from aligner.data.supervised import Example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.rewards.interface import ScoredResponses
from aligner.rewards.model import ModelReward

Kind = TypeVar("Kind", bound=Dataset[Any])


def longest_set(
    config: BaseRunConfig, read: Kind, tokenizer: Tokenizer, *readers: GPTArchitecture
) -> Kind:
    """As many items as one step takes, each of the most tokens that the run lets pass.

    ``read``: its training data; ``readers``: the models that the items pass through.
    """
    positions = min(each.max_position_embeddings for each in readers)
    vocab_size = min(tokenizer.vocab_size, *(each.vocab_size for each in readers))
    prompt, length = longest_lengths(config, positions, read=read.max_length)
    generator = torch.Generator().manual_seed(config.seed)

    def draw() -> list[int]:
        ids = torch.randint(vocab_size, (prompt or length,), generator=generator)
        return ids.tolist()

    items = [_lengthened(read[index % len(read)], draw) for index in range(_items_of_step(config))]
    return type(read)(items, dropped_too_long=read.dropped_too_long)


def _items_of_step(config: BaseRunConfig) -> int:
    if isinstance(config, SamplingRunConfig):
        rollout = config.model.rollout
        return rollout.num_rollout_samples // rollout.num_rollouts_per_prompt
    assert isinstance(config, SupervisedRunConfig), type(config)
    return config.model.global_batch_size // config.rows_per_example


def _lengthened(item: Any, draw: Callable[[], list[int]]) -> Any:
    """``item`` with other sequences, of which all but the first token is learned."""
    match item:
        case Prompt():
            return replace(item, text="", ids=draw())
        case Example():
            ids = draw()
            return replace(item, ids=ids, learned=[(1, len(ids))])
        case Rated():
            return replace(item, example=_lengthened(item.example, draw))
        case Pair() | Labelled():
            return item.with_examples([_lengthened(each, draw) for each in item.examples])
    raise TypeError(f"no item of a data set: {item!r:.80}")


class MadeUpRewards:
    """Rewards 0 and 1 in turn, whatever the response is.

    Args:
        model: a reward model of the run, which scores sequences as long as those of the rollout,
            of random tokens, and is not listened to; None: there is none.
        seed: of those tokens.
    """

    def __init__(self, model: ModelReward | None, seed: int) -> None:
        self.model, self._seed = model, seed

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row; reads ``input_lengths`` int64 [B]. Texts are empty."""
        if self.model is not None:
            self._ask(self.model, data["input_lengths"].tolist())
        rewards = (torch.arange(data.size) % 2).float()
        return ScoredResponses([""] * data.size, rewards, {})

    def _ask(self, reward: ModelReward, lengths: list[int]) -> None:
        encoder = reward.encoder
        generator = torch.Generator().manual_seed(self._seed)
        sequences = [
            torch.randint(
                encoder.tokenizer.vocab_size,
                (min(length, encoder.max_length),),
                generator=generator,
            ).tolist()
            for length in lengths
        ]
        reward.model.prepare_for_inference()
        reward.model.get_rewards(encoder.collate(sequences), reward.micro_batch_size)
        reward.model.finish_inference()
