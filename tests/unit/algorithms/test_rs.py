"""Rejection sampling: the best of each prompt, and the loss over what `infer` returns."""

import torch

from aligner.algorithms.rs.trainer import best_of_each
from aligner.models.gpt.megatron.actor import training_columns


def test_the_best_of_each_prompt():
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.0, 2.0, 3.0])
    assert best_of_each(rewards, 3, 1).tolist() == [1, 5]
    assert best_of_each(rewards, 3, 2).tolist() == [1, 2, 4, 5]
    assert best_of_each(rewards, 2, 1).tolist() == [1, 2, 5]
    assert best_of_each(torch.tensor([0.0, 1.0, 1.0, 1.0]), 4, 2).tolist() == [1, 2]
    # Prompts are told apart by their place: two draws of one prompt keep a response each.
    assert best_of_each(torch.tensor([1.0, 0.0, 0.5, 0.0]), 2, 1).tolist() == [0, 2]


def test_columns_of_what_infer_returns():
    rollout = {
        "response_tokens": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]),
        "response_lengths": torch.tensor([3, 4]),
        "prompt_lengths": torch.tensor([1, 3]),
        "is_end": torch.tensor([True, False]),
    }
    columns = training_columns(rollout)
    assert columns["token_mask"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]
    assert columns["sample_mask"].tolist() == [1, 1]
