"""Masks, reward shaping, metrics of updates and rewards, and shared prompts, by hand."""

import math

import pytest
import torch

from aligner.algorithms.rollout.inputs import shared_note
from aligner.algorithms.rollout.rollout import response_mask, shape_rewards
from aligner.config import ImproperEndConfig, RewardShapingConfig
from aligner.data.batches import Prompt
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.observe.diagnostics import count_updates, update_metrics
from aligner.rewards.function.runner import ScoredResponses
from aligner.rewards.model import VerifiedReward


def test_response_mask_comes_from_lengths():
    mask = response_mask(torch.tensor([1, 3, 2]), torch.tensor([3, 3, 4]), 4)
    assert mask.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("shaping", "improper", "shaped", "counts"),
    [
        (RewardShapingConfig(), ImproperEndConfig(), [1.0, 4.0], [1, 1]),
        (RewardShapingConfig(scale=2, shift=-1), ImproperEndConfig(), [1.0, 7.0], [1, 1]),
        (RewardShapingConfig(scale=2, clip=3), ImproperEndConfig(), [2.0, 3.0], [1, 1]),
        # A penalty comes off after the clip.
        (RewardShapingConfig(clip=3), ImproperEndConfig("penalize", 0.5), [1.0, 2.5], [1, 1]),
        (RewardShapingConfig(), ImproperEndConfig(mode="mask"), [1.0, 4.0], [1, 0]),
    ],
)
def test_shape_rewards(shaping, improper, shaped, counts):
    rewards, is_end = torch.tensor([1.0, 4.0]), torch.tensor([True, False])
    result, mask = shape_rewards(rewards, is_end, shaping, improper)
    assert result.tolist() == shaped
    assert mask.tolist() == counts


def test_update_metrics_average_updates_and_keep_extremes():
    results = [
        {"all_mb_metrics": {"loss": [1.0, 3.0], "ratio_max": [1.5, 2.0], "lr": [0.1, 0.2]}},
        {"all_mb_metrics": {"loss": [5.0], "ratio_max": [1.0], "lr": [0.3], "grad_norm": [4.0]}},
    ]
    metrics = update_metrics(results)
    counts = {"skipped_updates": 0, "empty_updates": 0}
    assert metrics == {"loss": 3.0, "ratio_max": 2.0, "lr": 0.3, "grad_norm": 4.0, **counts}
    assert count_updates(results) == 3


def test_updates_that_were_none_are_counted():
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


def test_validation_prompts_that_are_learned_are_counted():
    def prompts(*texts):
        items = [Prompt(i, text, [ord(c) for c in text], None) for i, text in enumerate(texts)]
        return PromptDataset(items)

    train = prompts("a", "b", "c")
    (note,) = shared_note(train, prompts("b", "d", "a"))
    assert note.startswith("2 of 3 validation prompts are training prompts")
    assert shared_note(train, prompts("x")) == shared_note(train, None) == []
