"""Parts of a PPO run that depend on whether it is of conversations, and notes before it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from user_code import configured

from aligner.algorithms.ppo.build import make_policy_loss, run_notes
from aligner.algorithms.rs.trainer import RSTrainer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.rewards.function.runner import ScoredResponses


@pytest.mark.parametrize(
    ("limits", "longest"),
    [({}, 8), ({"max_tokens": 200, "max_turns": 3}, 24), ({"max_tokens": 20, "max_turns": 3}, 20)],
)
def test_fixed_length_is_that_of_the_longest_sample(limits, longest):
    overrides = {"model__ppo__loss_aggregation": "fixed_length"}
    overrides["model__ppo__length_params"] = {"max_length": 8}
    if limits:
        overrides["environment"] = {"factory": "a.b:C", **limits}
        overrides["reward"] = {"kind": "environment"}
    assert make_policy_loss(configured(**overrides)).max_response_length == longest


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_of_adapters_is_noted(dropout):
    peft = {"peft_scheme": "lora", "lora_tuning": {"adapter_dropout": dropout}}
    notes = run_notes(configured(model__peft=peft))
    assert [f"adapter_dropout={dropout:g}" in note for note in notes] == [True] * (dropout > 0)


def test_kept_rewards_are_of_what_is_learned():
    """Of the second prompt's two conversations none counts, and one of them is kept."""
    batch = BatchedDataDict(
        {
            "input_ids": torch.zeros(4, 3, dtype=torch.int64),
            "input_lengths": torch.full((4,), 3),
            "prompt_lengths": torch.ones(4, dtype=torch.int64),
            "is_end": torch.ones(4, dtype=torch.bool),
            "token_mask": torch.ones(4, 3),
            "sample_mask": torch.tensor([1.0, 1.0, 0.0, 0.0]),
            **{name: [None] * 4 for name in ("prompts", "ground_truths", "columns")},
            "sample_ids": torch.arange(4),
        }
    )
    scored = ScoredResponses(["x"] * 4, torch.tensor([2.0, 1.0, 0.0, 0.0]), {})
    policy = SimpleNamespace(
        prepare_for_training=lambda: None,
        train=lambda batch, loss: {"all_mb_metrics": {"loss": [1.0]}},
        finish_training=lambda: None,
    )
    rs = SimpleNamespace(num_rollouts_per_prompt=2, top_n_rollouts=1)
    manager = SimpleNamespace(samples_per_step=0)
    trainer = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(rs=rs), exp_manager=manager),
        rollouts=SimpleNamespace(take=lambda first, more: batch),
        reward=SimpleNamespace(get_rewards=lambda batch: scored),
        generation=SimpleNamespace(weights_changed=lambda: None),
        sampler=SimpleNamespace(epoch=0),
        has_next=lambda step: True,
        **{"policy": policy, "loss": None, "consumed_samples": 0, "updates": 0},
    )
    metrics = RSTrainer.step(trainer, 1, lambda name: nullcontext()).metrics
    assert metrics["train_rollouts/kept_rewards"] == 2.0
