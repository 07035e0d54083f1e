"""Parts of a step: rewards, metrics of updates, the best responses, options of the loss."""

import math
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from settings import parsed
from test_credit import rollout
from user_code import configured

from aligner.algorithms.ppo.build import make_policy_loss, run_notes
from aligner.algorithms.rollout.inputs import shared_note
from aligner.algorithms.rs.trainer import RSTrainer, best_of_each
from aligner.config import PromptSourceConfig
from aligner.config.commands.lengths import longest_lengths
from aligner.data.batches import Prompt
from aligner.data.prompts import EpisodeDataset, PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.observe.diagnostics import count_updates, update_metrics
from aligner.rewards.function.runner import ScoredResponses
from aligner.rewards.model import VerifiedReward


def test_update_metrics_average_updates_and_count_those_that_were_none():
    results = [
        {"all_mb_metrics": {"loss": [1.0, 3.0], "ratio_max": [1.5, 2.0], "lr": [0.1, 0.2]}},
        {"all_mb_metrics": {"loss": [5.0], "ratio_max": [1.0], "lr": [0.3], "grad_norm": [4.0]}},
    ]
    metrics = update_metrics(results)
    counts = {"skipped_updates": 0, "empty_updates": 0}
    assert metrics == {"loss": 3.0, "ratio_max": 2.0, "lr": 0.3, "grad_norm": 4.0, **counts}
    assert count_updates(results) == 3
    steps = {"loss": [0.0, 2.0], "empty": [1.0, 0.0], "lr": [0.1, 0.1], "grad_norm": [0.0, 3.0]}
    results = [{"all_mb_metrics": steps}]
    metrics = update_metrics(results)
    assert (metrics["loss"], metrics["grad_norm"], metrics["empty_updates"]) == (2.0, 3.0, 1.0)
    assert count_updates(results) == 1
    assert math.isnan(update_metrics([{"all_mb_metrics": {"loss": [0.0], "empty": [1.0]}}])["loss"])
    results = [{"all_mb_metrics": {"loss": [math.nan, 2.0], "skipped": [1.0, 0.0]}}]
    metrics = update_metrics(results)
    assert metrics["loss"] == 2.0
    assert metrics["skipped_updates"] == 1.0


def test_a_rating_of_the_verifiers_name_leaves_the_verifiers_alone():
    class Source:
        def __init__(self, parts):
            self.parts = parts

        def get_rewards(self, data):
            return ScoredResponses(["r"] * 2, torch.tensor([0.5, 2.0]), self.parts)

    rated = Source({"accuracy": [0.7, 0.8], "humour": [1.0, 2.0]})
    both = VerifiedReward(rated, Source({"accuracy": [1.0, 0.0]})).get_rewards(BatchedDataDict())
    assert both.parts == {
        "accuracy": [1.0, 0.0],
        "verified": [0.5, 2.0],
        "rated_accuracy": [0.7, 0.8],
        "humour": [1.0, 2.0],
    }


def test_learned_validation_prompts_and_dropout_of_adapters_are_noted():
    def prompts(*texts):
        items = [Prompt(i, text, [ord(c) for c in text], None) for i, text in enumerate(texts)]
        return PromptDataset(items)

    train = prompts("a", "b", "c")
    (note,) = shared_note(train, prompts("b", "d", "a"))
    assert note.startswith("2 of 3 validation prompts are training prompts")
    assert shared_note(train, prompts("x")) == shared_note(train, None) == []
    for dropout in (0.0, 0.1):
        peft = {"peft_scheme": "lora", "lora_tuning": {"adapter_dropout": dropout}}
        notes = run_notes(configured(model__peft=peft))
        assert [f"adapter_dropout={dropout:g}" in note for note in notes] == [True] * (dropout > 0)


def test_the_best_of_each_prompt():
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.0, 2.0, 3.0])
    assert best_of_each(rewards, 3, 1).tolist() == [1, 5]
    assert best_of_each(rewards, 3, 2).tolist() == [1, 2, 4, 5]
    assert best_of_each(rewards, 2, 1).tolist() == [1, 2, 5]
    assert best_of_each(torch.tensor([0.0, 1.0, 1.0, 1.0]), 4, 2).tolist() == [1, 2]
    # Prompts are told apart by their place: two draws of one prompt keep a response each.
    assert best_of_each(torch.tensor([1.0, 0.0, 0.5, 0.0]), 2, 1).tolist() == [0, 2]


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


def test_kept_rewards_are_of_what_is_learned():
    """Of the second prompt's two conversations none counts, and one of them is kept."""
    batch = rollout([0] * 4, lengths=[1] * 4)
    batch |= {name: [None] * 4 for name in ("prompts", "ground_truths", "columns")}
    batch |= {"sample_mask": torch.tensor([1.0, 1.0, 0.0, 0.0]), "sample_ids": torch.arange(4)}
    scored = ScoredResponses(["x"] * 4, torch.tensor([2.0, 1.0, 0.0, 0.0]), {})
    trainer = Mock(consumed_samples=0, updates=0)
    trainer.config.model.rs = Mock(num_rollouts_per_prompt=2, top_n_rollouts=1)
    trainer.config.exp_manager.samples_per_step = trainer.sampler.epoch = 0
    trainer.rollouts.take.return_value = batch
    trainer.reward.get_rewards.return_value = scored
    trainer.policy.train.return_value = {"all_mb_metrics": {"loss": [1.0]}}
    metrics = RSTrainer.step(trainer, 1, lambda name: nullcontext()).metrics
    assert metrics["train_rollouts/kept_rewards"] == 2.0


def test_lengths_and_ground_truths_of_conversations(tmp_path):
    game = "reward.kind=environment reward.function= environment.factory=a.b:Game"
    lengths = "environment.max_tokens=200 model.ppo.length_params.max_length=10"
    config = parsed(f"{game} {lengths}")
    assert longest_lengths(config) == (190, 10)
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"secret": 3}\n{"prompt": "p", "x": null}\n')
    for column, truths in (("secret", [3, None]), (None, [None, None])):
        episodes = EpisodeDataset.read(PromptSourceConfig(str(rows)), 190, column)
        assert episodes.max_length == 190
        assert [episodes[n].ground_truth for n in range(2)] == truths
        columns = [episodes[n].columns for n in range(2)]
        assert columns == [{"secret": 3}, {"prompt": "p", "x": None}]
