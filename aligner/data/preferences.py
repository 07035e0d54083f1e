"""Data sets of feedback on responses: preference pairs, labels, and ratings.

KTO estimates the KL divergence of the policy from the reference with responses to other prompts
(Ethayarajh et al., 2024). Every labelled row therefore has a *mismatched* example: its prompt with
the response of the nearest earlier row that has another prompt (in TRL, of the previous row).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional

from aligner.config import (
    PairDataConfig,
    PreferenceDataConfig,
    PromptSourceConfig,
    RewardDataConfig,
)
from aligner.data.dataset import Dataset
from aligner.data.readers import DataRow, converted, finite_number
from aligner.data.supervised import Example, Examples, collate_examples, make_example
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError

MISMATCHED = "mismatched_"  # prefix of the columns of mismatched examples in a batch


@dataclass(frozen=True)
class Pair(Examples):
    """Chosen and rejected response to one prompt. ``rewards``: the rewards of both."""

    chosen: Example
    rejected: Example
    rewards: tuple[float, float] = (1.0, 0.0)
    sequences = ("chosen", "rejected")


class PairDataset(Dataset[Pair]):
    """All pairs, in the order of their source."""

    noun = "pairs"
    keys = ("prompt_column", "chosen_column", "rejected_column")
    rewards_in_order: ClassVar[bool] = False  # refuse rows with a higher reward for the rejected

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: PairDataConfig) -> Pair:
        """Return the pair of ``row``. For arguments and errors see `Dataset.make`."""
        # Both responses must continue the same prompt.
        chosen = make_example(row, index, tokenizer, data, "chosen_column")
        rejected = make_example(row, index, tokenizer, data, "rejected_column")
        problem = ""
        if chosen.prompt_ids != rejected.prompt_ids:
            problem = (
                f"the chats of columns {data.chosen_column!r} and {data.rejected_column!r} differ "
                "before their last message. Give two answers to the same messages"
            )
        elif chosen.ids == rejected.ids:
            problem = "the chosen and the rejected response are equal. Remove the row"
        if problem:
            raise DataError(f"{row.location}: {problem}")
        # Without reward columns, the rewards are 1 and 0.
        columns = (data.chosen_reward_column, 1.0), (data.rejected_reward_column, 0.0)
        chosen_reward, rejected_reward = (
            default if column is None else converted(row, column, finite_number, "a finite number")
            for column, default in columns
        )
        if cls.rewards_in_order and chosen_reward < rejected_reward:
            raise DataError(
                f"{row.location}: the chosen response has a lower reward, {chosen_reward:g} "
                f"({data.chosen_reward_column!r}), than the rejected one, {rejected_reward:g} "
                f"({data.rejected_reward_column!r}). Swap the columns or remove the row. "
                "Otherwise the policy learns the opposite preference"
            )
        return Pair(chosen, rejected, (chosen_reward, rejected_reward))


class OrderedPairDataset(PairDataset):
    """Pairs whose chosen response has at least the reward of the rejected response."""

    rewards_in_order = True


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> BatchedDataDict:
    """Collate pairs to a batch with two adjacent rows per pair, first the chosen example.

    In addition to the columns of `collate_examples`, the batch has ``ground_truth_rewards`` float32
    [B], the reward of each row, and ``preference_strengths`` float32 [B], the chosen minus the
    rejected reward of the row's pair.
    """
    batch = collate_examples([example for pair in pairs for example in pair.examples], pad_id)
    rewards = torch.tensor([pair.rewards for pair in pairs])
    batch["ground_truth_rewards"] = rewards.flatten()
    batch["preference_strengths"] = (rewards[:, 0] - rewards[:, 1]).repeat_interleave(2)
    return batch


@dataclass(frozen=True)
class Labelled(Examples):
    """Example whose response is labelled as desirable or not."""

    example: Example
    desirable: bool
    mismatched: Example  # the prompt with a response to another prompt
    sequences = ("example", "mismatched")


class LabelledDataset(Dataset[Labelled]):
    """All labelled responses, in the order of their source. A pair gives two labelled responses."""

    keys = ("prompt_column", "response_column", "label_column", "chosen_column")

    @classmethod
    def load(
        cls, source: PromptSourceConfig, tokenizer: Tokenizer, data: PreferenceDataConfig
    ) -> Self:
        """Read ``source`` as `Dataset.load` does, and add a mismatched example to each response."""
        responses = super().load(source, tokenizer, data)
        examples = [row.example for row in responses.items]
        responses.items = [
            replace(row, mismatched=_mismatched(examples, index, data.max_length, source))
            for index, row in enumerate(responses.items)
        ]
        return responses

    @classmethod
    def make(
        cls, row: DataRow, index: int, tokenizer: Tokenizer, data: PreferenceDataConfig
    ) -> Labelled:
        """Return the response of ``row`` as `Dataset.make` does. `load` sets ``mismatched``."""
        label = converted(row, data.label_column, _label, "true or false (or 1 or 0)")
        example = make_example(row, index, tokenizer, data)
        return Labelled(example, label, mismatched=example)


def collate_labelled(rows: Sequence[Labelled], pad_id: int) -> BatchedDataDict:
    """Collate labelled responses to a batch.

    The batch has the columns of `collate_examples` for the labelled examples. The same columns with
    the prefix `MISMATCHED` contain the mismatched examples. ``desirable``, float32 [B], is 1 if the
    response is desirable, else 0.
    """
    batch = collate_examples([row.example for row in rows], pad_id)
    mismatched = collate_examples([row.mismatched for row in rows], pad_id)
    batch.update({f"{MISMATCHED}{name}": column for name, column in mismatched.items()})
    batch["desirable"] = torch.tensor([float(row.desirable) for row in rows])
    return batch


def _mismatched(
    examples: Sequence[Example], index: int, longest: int | None, source: PromptSourceConfig
) -> Example:
    """Join a prompt with the nearest earlier response to another prompt that fits ``longest``."""
    prompt = examples[index].prompt_ids
    for step in range(1, len(examples)):
        candidate = examples[index - step]  # a negative index continues from the end
        start, end = candidate.learned[-1]
        length = len(prompt) + end - start
        if candidate.prompt_ids != prompt and (longest is None or length <= longest):
            ids = [*prompt, *candidate.ids[start:end]]
            return Example(examples[index].id, ids, [(len(prompt), len(ids))])
    raise DataError(
        f"data: {source.source}: row {examples[index].id + 1} has a prompt of {len(prompt)} "
        f"tokens. Together with a response to another prompt, it exceeds max_length={longest}, or "
        "all prompts are equal. Raise max_length, remove the row, or give other prompts"
    )


def _label(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None


@dataclass(frozen=True)
class Rated(Examples):
    """Example with ratings of its response."""

    example: Example
    ratings: tuple[float | None, ...]  # one per attribute, None if unknown
    sequences = ("example",)


class RatedDataset(Dataset[Rated]):
    """All rated responses, in the order of their source.

    Each column of ``data.attribute_columns`` contains a number, or null if there is no rating.
    """

    noun = "rated responses"
    keys = ("prompt_column", "response_column")

    @classmethod
    def make(cls, row: DataRow, index: int, tokenizer: Tokenizer, data: RewardDataConfig) -> Rated:
        """Return the rated response of ``row``. For arguments and errors see `Dataset.make`."""
        example, columns = make_example(row, index, tokenizer, data), data.attribute_columns
        ratings = tuple(
            None
            if row.get(column) is None
            else converted(row, column, finite_number, "a finite number or null")
            for column in columns
        )
        if all(rating is None for rating in ratings):
            raise DataError(
                f"{row.location}: none of the columns {list(columns)} contains a rating. Set "
                f"data.attribute_columns to columns with ratings, or remove the row. {row.remedy}"
            )
        return Rated(example, ratings)


def collate_rated(rated: Sequence[Rated], pad_id: int) -> BatchedDataDict:
    """Collate rated examples to a batch with the columns of `collate_examples` and ratings.

    ``attributes``: float32 [B, K], ratings of K attributes, 0 if unknown. ``attribute_mask``:
    float32 [B, K], 1 for known ratings, else 0. Sequences are padded to more than K tokens, because
    the trainer treats a column [B, S] as one value per token.
    """
    batch = collate_examples([row.example for row in rated], pad_id)
    is_rated = [[rating is not None for rating in row.ratings] for row in rated]
    batch["attributes"] = torch.tensor([[rating or 0.0 for rating in row.ratings] for row in rated])
    batch["attribute_mask"] = torch.tensor(is_rated).float()
    missing = batch["attributes"].shape[1] + 1 - batch["input_ids"].shape[1]
    if missing > 0:
        batch["input_ids"] = functional.pad(batch["input_ids"], (0, missing), value=pad_id)
        batch["token_mask"] = functional.pad(batch["token_mask"], (0, missing))
    return batch
