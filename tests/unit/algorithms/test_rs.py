"""Rejection sampling: the best of each prompt, and the loss over what `infer` returns."""

import pytest
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


@pytest.mark.integration
def test_the_loss_is_the_mean_of_the_response(tiny_nemo):
    """-mean log-prob over response tokens, by the log-probs that the same model reports."""
    from aligner.models.gpt import MegatronGPTRSModel, load_from_nemo
    from aligner.models.gpt.role.settings import RoleSettings
    from aligner.parallel.groups import initialize_parallel

    initialize_parallel()
    model = load_from_nemo(MegatronGPTRSModel, RoleSettings(), restore_path=str(tiny_nemo))
    text = torch.tensor([[11, 12, 13, 0], [21, 22, 23, 24]])
    rollout = model.infer({"text": text, "length": torch.tensor([3, 4])}, seed=3)
    loss, metrics = model.get_loss_and_metrics(rollout, forward_only=True)
    columns = training_columns(rollout)
    logprobs = model.get_inference_log_probs(rollout["response_tokens"])
    expected = -(logprobs * columns["token_mask"]).sum() / columns["token_mask"].sum()
    assert loss == metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
