"""Scores of a rollout's responses by a reward function.

Only rank 0 calls the function and broadcasts the result. A function with side effects or random
results is therefore called once.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aligner.config import RewardConfig
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, RewardError
from aligner.parallel.collectives import on_rank_zero
from aligner.rewards.function.runner import RewardFunction, ScoredResponses
from aligner.rewards.protocol import Samples


def rated_responses(
    responses: list[str],
    scores: Tensor,
    attributes: Sequence[str],
    weights: Tensor | None,
    *,
    prompts: Sequence[str],
    source: str,
) -> ScoredResponses:
    """Return the rewards for a model's ``scores``, float [B] or [B, K] of the K ``attributes``.

    ``weights``: from `check_weights`. ``source``: name of the model, for messages. Raises
    `RewardError` if a reward is not finite in float32, though it may be finite in the source.
    """
    scores = scores.float()
    rewards = scores.flatten()
    if weights is not None:
        rewards = (scores.reshape(len(scores), -1) * weights).sum(1)
    infinite = (~rewards.isfinite()).nonzero().flatten().tolist()
    if infinite:
        samples = Samples(list(prompts), responses, [None] * len(responses))
        raise RewardError(
            f"{source} rates {samples.describe(infinite[0])} with {rewards[infinite[0]]}. A reward "
            "must be finite in float32"
        )
    parts = dict(zip(attributes, scores.T.tolist(), strict=True)) if len(attributes) > 1 else {}
    return ScoredResponses(responses, rewards, parts)


def token_rows(data: BatchedDataDict) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of prompt and response of each row of a rollout."""
    names = ("input_ids", "prompt_lengths", "input_lengths")
    for ids, start, end in zip(*(data[name].tolist() for name in names), strict=True):
        yield ids[:start], ids[start:end]


def response_texts(tokenizer: Tokenizer, data: BatchedDataDict) -> list[str]:
    """Return the responses of a rollout, without the end-of-sequence token.

    Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B].
    """
    return [decode_response(tokenizer, *row) for row in token_rows(data)]


class RewardInterface(Protocol):
    """Scores the responses of a rollout."""

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row."""
        ...


class Reward:
    """Scores responses with a ``RewardFunction``."""

    def __init__(self, function: RewardFunction | None, tokenizer: Tokenizer) -> None:
        self._function = function
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, config: RewardConfig, tokenizer: Tokenizer) -> "Reward":
        """Import the function ``reward.function``. An invalid name fails on every rank."""
        reward = cls(None, tokenizer)

        def load() -> None:
            assert config.function is not None, "checked with the configuration"
            names = ("kwargs", "time_limit_s", "max_concurrency", "timeout_reward")
            options = {name: getattr(config, name) for name in names}
            reward._function = RewardFunction(config.function, **options)

        on_rank_zero(load)
        return reward

    def check_columns(self, available: frozenset[str]) -> None:
        """Raise `DataError` if the data lacks a column that the function needs."""
        columns = available | {"is_end", "response_lengths"}
        on_rank_zero(lambda: self._rank_zero_function().check_columns(columns))

    def notes(self) -> list[str]:
        """Return a note for the start-up report if the function has another library's form."""

        def note() -> list[str]:
            function = self._rank_zero_function()
            name, form = function.signature.name, function.signature.form
            return [f"reward.function={name} is called in the form of {form}"] if form else []

        return on_rank_zero(note)

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Decode and score every row.

        Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B],
        ``is_end`` bool [B], and the lists ``prompts``, ``ground_truths`` and ``columns`` (a dict
        of the data's other columns for each row).
        """

        def score() -> ScoredResponses:
            responses, rows = response_texts(self.tokenizer, data), data["columns"]
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names}
            lengths = data["input_lengths"] - data["prompt_lengths"]
            columns |= {"is_end": data["is_end"].tolist(), "response_lengths": lengths.tolist()}
            function, truths = self._rank_zero_function(), data["ground_truths"]
            return function(data["prompts"], responses, truths, columns)

        return on_rank_zero(score)

    def shutdown(self) -> bool:
        """End the function's processes."""
        if self._function is not None:
            self._function.close()
        return True

    def _rank_zero_function(self) -> RewardFunction:
        assert self._function is not None, "rank 0 must hold the reward function"
        return self._function


def check_weights(
    weights: Sequence[float] | None, attributes: Sequence[str], source: str
) -> Tensor | None:
    """Return the weights float32 [K] of K attributes, None if the reward is a single number.

    ``attributes``: empty if the source was trained on comparisons, with a single number per sample.
    ``source``: name of the source, for messages.
    """
    count = max(1, len(attributes))
    if weights is None and count == 1:
        return None
    if weights is None:
        raise ConfigError(
            f"{source} rates {count} attributes ({', '.join(attributes)}). Set "
            f"reward.attribute_weights to {count} numbers in this order, for their weighted sum"
        )
    if len(weights) != count:
        raise ConfigError(
            f"reward.attribute_weights={list(weights)} has {len(weights)} numbers, and {source} "
            f"rates {count} ({', '.join(attributes) or 'one reward'}). Set a number for each"
        )
    return torch.tensor(weights, dtype=torch.float32)
