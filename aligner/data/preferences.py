"""Preference pairs: two responses to one prompt, of which one is better.

A row is a prompt with a chosen and a rejected response, and perhaps the reward of each. The
responses are text, or lists of chat messages: the assistant's only, or the whole chat, and then
the prompt may be missing or stand beside it. In a batch the two sequences of a pair are adjacent
rows, the chosen one first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from aligner.config import PairDataConfig
from aligner.data.dataset import Dataset
from aligner.data.readers import Row, converted, finite_number
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


@dataclass(frozen=True)
class Pair(Examples):
    """Two examples of one prompt. ``rewards``: of chosen and rejected; 1 and 0 if unknown."""

    chosen: Example
    rejected: Example
    rewards: tuple[float, float] = (1.0, 0.0)
    sequences = ("chosen", "rejected")


class PairDataset(Dataset[Pair]):
    """All pairs, in the order of their source."""

    what = "pairs"
    rewards_in_order: ClassVar[bool] = False  # refuse rows whose chosen one has the lower reward

    @classmethod
    def make(cls, row: Row, index: int, tokenizer: Tokenizer, data: PairDataConfig) -> Pair:
        """See `aligner.data.dataset.Dataset.make`."""
        chosen = make_example(row, index, tokenizer, data, "chosen_column")
        rejected = make_example(row, index, tokenizer, data, "rejected_column")
        if chosen.prompt_ids != rejected.prompt_ids:
            raise DataError(
                f"{row.place}: the chats of columns {data.chosen_column!r} and "
                f"{data.rejected_column!r} differ before their last message; a preference is "
                "between two answers to the same messages"
            )
        if chosen.ids == rejected.ids:
            raise DataError(
                f"{row.place}: the chosen and the rejected response are the same; remove the row"
            )
        chosen_reward, rejected_reward = (
            default if column is None else converted(row, column, finite_number, "a finite number")
            for column, default in (
                (data.chosen_reward_column, 1.0),
                (data.rejected_reward_column, 0.0),
            )
        )
        if cls.rewards_in_order and chosen_reward < rejected_reward:
            raise DataError(
                f"{row.place}: the chosen response has the reward {chosen_reward:g} "
                f"({data.chosen_reward_column!r}) and the rejected one {rejected_reward:g} "
                f"({data.rejected_reward_column!r}); swap the columns or remove the row: a "
                "preference of negative strength would be learned the wrong way round"
            )
        return Pair(chosen, rejected, (chosen_reward, rejected_reward))


class OrderedPairDataset(PairDataset):
    """Pairs whose chosen response has no lower reward than the rejected one."""

    rewards_in_order = True


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> BatchedDataDict:
    """Columns of `collate_examples` with 2 rows for each pair, chosen before rejected.

    ``ground_truth_rewards`` float32 [B]: the reward of each row. ``preference_strengths`` float32
    [B]: by how much the chosen response of the row's pair is better.
    """
    batch = collate_examples([example for pair in pairs for example in pair.examples], pad_id)
    rewards = torch.tensor([pair.rewards for pair in pairs])
    batch["ground_truth_rewards"] = rewards.flatten()
    batch["preference_strengths"] = (rewards[:, 0] - rewards[:, 1]).repeat_interleave(2)
    return batch


def length_accuracy(train: Iterable[Pair], held_out: Iterable[Pair]) -> float:
    """Share of ``held_out`` that "the longer is better" ranks right, or "the shorter is better".

    Which of the two rules, the training pairs decide. A pair of equal lengths counts half. A reward
    model has to beat it.
    """
    longer_is_better = _longer_chosen(train) >= 0.5
    share = _longer_chosen(held_out)
    return share if longer_is_better else 1 - share


def _longer_chosen(pairs: Iterable[Pair]) -> float:
    gaps = [pair.chosen.length - pair.rejected.length for pair in pairs]
    return sum(0.5 if gap == 0 else float(gap > 0) for gap in gaps) / len(gaps)
