"""Credit without a critic, worked by hand, and rollouts filled with groups that teach."""

import math

import pytest
import torch

from aligner.algorithms.credit import Credit
from aligner.algorithms.dynamic_sampling import fill_with_signal
from aligner.config import TrainerPPOConfig
from aligner.config.trainer import AdvantageConfig, ImproperEndConfig, RewardShapingConfig
from aligner.distributed.batched_data_dict import BatchedDataDict

PROMPT, WIDTH = 2, 6


def rollout(rewards, lengths, ended=None, first=0):
    """Responses of the given lengths to prompts of two tokens."""
    rows = len(rewards)
    position = torch.arange(WIDTH)
    total = torch.tensor(lengths) + PROMPT
    return BatchedDataDict(
        {
            "input_ids": torch.arange(first, first + rows)[:, None].expand(-1, WIDTH).clone(),
            "input_lengths": total,
            "prompt_lengths": torch.full((rows,), PROMPT),
            "is_end": torch.tensor(ended or [True] * rows),
            "token_mask": ((position >= PROMPT) & (position < total[:, None])).float(),
            "sample_mask": torch.ones(rows),
            "rewards": torch.tensor(rewards, dtype=torch.float32),
        }
    )


def credit(estimator, *, charges_kl=False, **options):
    trainer = TrainerPPOConfig(
        advantage=AdvantageConfig(estimator=estimator), normalize_advantages=False, **options
    )
    return Credit(trainer, charges_kl, rollouts_per_prompt=2, max_length=4)


def test_rloo_by_hand():
    """Prompt A earns 1 and 0, prompt B twice 0.5: what one earns more than the other."""
    batch = rollout([1, 0, 0.5, 0.5], [3, 1, 2, 4])
    metrics, kl = credit("rloo").assign(batch, beta=0.0)
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None] * batch["token_mask"]
    assert torch.equal(batch["advantages"], expected)
    assert "returns" not in batch
    assert kl == 0.0
    assert metrics["train_rollouts/samples_with_signal"] == 0.5
    assert metrics["train_rollouts/shaped_rewards"] == pytest.approx(0.5)


def test_the_kl_is_part_of_the_reward():
    """Each token's KL is 0.1; the first response has 3 tokens, the second 1: 1 - 0.6, 0 - 0.2."""
    batch = rollout([1, 0], [3, 1])
    batch["prev_logprobs"] = torch.full((2, WIDTH), -1.0)
    batch["ref_logprobs"] = torch.full((2, WIDTH), -1.1)
    metrics, kl = credit("rloo", charges_kl=True).assign(batch, beta=2.0)
    assert batch["advantages"][0, PROMPT].item() == pytest.approx(0.4 - -0.2)
    assert batch["advantages"][1, PROMPT].item() == pytest.approx(-0.2 - 0.4)
    assert kl == pytest.approx(0.2)  # (3 + 1) · 0.1 / 2
    assert metrics["train_rollouts/kl_penalty"] == pytest.approx(0.4)


def test_a_masked_sample_is_nobodys_baseline():
    batch = rollout([1, 0, 1, 0], [1, 4, 1, 1], ended=[True, False, True, True])
    credit("rloo", improper_end=ImproperEndConfig(mode="mask")).assign(batch, beta=0.0)
    assert batch["sample_mask"].tolist() == [1, 0, 1, 1]
    assert batch["advantages"][:, PROMPT].tolist() == [0, 0, 1, -1]


def test_long_responses_pay():
    """Of 4 tokens the last 2 cost: 3 tokens pay a half, 4 pay 1, and so does the one cut off."""
    batch = rollout([1, 1, 1, 1], [2, 3, 4, 1], ended=[True, True, True, False])
    metrics, _ = credit("reinforce", reward=RewardShapingConfig(overlong_cache=2)).assign(
        batch, 0.0
    )
    assert batch["advantages"][:, PROMPT].tolist() == [1, 0.5, 0, 0]
    assert metrics["train_rollouts/shaped_rewards"] == pytest.approx(0.375)


def test_reinforce_plus_plus_is_white():
    batch = rollout([1, 0, 0, 0], [1, 1, 1, 1])
    credit("reinforce_plus_plus").assign(batch, beta=0.0)
    token = batch["advantages"][:, PROMPT]
    assert token.mean().item() == pytest.approx(0, abs=1e-6)
    assert token[0].item() == pytest.approx(0.75 / math.sqrt(0.25))


def draws(*rewards):
    """A `draw` that gives these rollouts, one after the other."""
    rollouts = [rollout(each, [1] * len(each), first=10 * n) for n, each in enumerate(rewards)]
    iterator = iter(rollouts)
    return lambda: next(iterator)


def fill(draw, max_rollouts=3):
    return fill_with_signal(draw, rollouts_per_prompt=2, max_rollouts=max_rollouts, pad_id=0)


def test_groups_without_signal_are_replaced():
    batch, drawn = fill(draws([1, 1, 1, 0], [0, 1, 1, 0], [9, 9, 9, 9]))
    assert drawn == 8  # the third rollout was not needed
    assert batch["input_ids"][:, 0].tolist() == [2, 3, 10, 11]


def test_too_few_are_filled_up_with_the_earliest():
    batch, drawn = fill(draws([1, 1, 0, 0], [0, 1, 1, 1]), max_rollouts=2)
    assert drawn == 8
    assert batch["input_ids"][:, 0].tolist() == [10, 11, 0, 1]


def test_nothing_has_signal():
    batch, drawn = fill(draws([1, 1, 0, 0]), max_rollouts=1)
    assert (drawn, batch["input_ids"][:, 0].tolist()) == (4, [0, 1, 2, 3])
