"""Preference pairs: two responses to one prompt, of which one is better.

A row is a prompt with a chosen and a rejected response, and optionally their rewards. A response is
text, or a list of chat messages: only the assistant's, or the complete chat. For complete chats
the prompt column is optional. In a batch the two sequences of a pair are adjacent rows, the chosen
sequence first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from aligner.config import PairDataConfig
from aligner.data.dataset import Dataset
from aligner.data.readers import DataRow, converted, finite_number
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


@dataclass(frozen=True)
class Pair(Examples):
    """Two examples of a prompt. ``rewards``: the chosen's and the rejected's, or 1 and 0."""

    chosen: Example
    rejected: Example
    rewards: tuple[float, float] = (1.0, 0.0)
    sequences = ("chosen", "rejected")


class PairDataset(Dataset[Pair]):
    """All pairs, in the order of their source."""

    noun = "pairs"
    rewards_in_order: ClassVar[bool] = False  # refuse rows whose chosen response has less reward

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: PairDataConfig) -> Pair:
        """See `aligner.data.dataset.Dataset.make`."""
        # Both responses must continue the same prompt.
        chosen = make_example(row, index, tokenizer, data, "chosen_column")
        rejected = make_example(row, index, tokenizer, data, "rejected_column")
        if chosen.prompt_ids != rejected.prompt_ids:
            raise DataError(
                f"{row.location}: the chats of columns {data.chosen_column!r} and "
                f"{data.rejected_column!r} differ before their last message. A preference "
                "compares two answers to the same messages"
            )
        if chosen.ids == rejected.ids:
            raise DataError(
                f"{row.location}: the chosen and the rejected response are equal. Remove the row"
            )
        # Without reward columns, the rewards are 1 and 0.
        chosen_reward, rejected_reward = (
            default if column is None else converted(row, column, finite_number, "a finite number")
            for column, default in (
                (data.chosen_reward_column, 1.0),
                (data.rejected_reward_column, 0.0),
            )
        )
        if cls.rewards_in_order and chosen_reward < rejected_reward:
            raise DataError(
                f"{row.location}: the chosen response has the reward {chosen_reward:g} "
                f"({data.chosen_reward_column!r}) and the rejected one {rejected_reward:g} "
                f"({data.rejected_reward_column!r}). Swap the columns or remove the row: a "
                "preference of negative strength would be learned in the wrong direction"
            )
        return Pair(chosen, rejected, (chosen_reward, rejected_reward))


class OrderedPairDataset(PairDataset):
    """Pairs whose chosen response has at least the reward of the rejected response."""

    rewards_in_order = True


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> BatchedDataDict:
    """Return `collate_examples` with 2 rows for each pair, chosen before rejected.

    ``ground_truth_rewards`` float32 [B]: reward of each row. ``preference_strengths`` float32 [B]:
    difference of the chosen and the rejected reward of the row's pair.
    """
    batch = collate_examples([example for pair in pairs for example in pair.examples], pad_id)
    rewards = torch.tensor([pair.rewards for pair in pairs])
    batch["ground_truth_rewards"] = rewards.flatten()
    batch["preference_strengths"] = (rewards[:, 0] - rewards[:, 1]).repeat_interleave(2)
    return batch
