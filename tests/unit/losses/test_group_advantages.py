"""Advantages without a critic, and the overlong penalty: by hand and against plain loops."""

import math

import pytest
import torch

from aligner.losses.groups import (
    discounted_returns,
    group_advantages,
    has_reward_variance,
    soft_overlong_penalty,
    token_advantages,
)

NAN = float("nan")

# Groups 7 (1, 0, 1 and one sample that does not count), 3 (all equal), 9 (alone); interleaved.
REWARDS = torch.tensor([1.0, 0.1, 0.0, NAN, 0.1, 1.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7, 9])
COUNTS = torch.tensor([1.0, 1, 1, 0, 1, 1, 1])


# Unbiased variance of (1, 0, 1): (1/9 + 4/9 + 1/9) / 2 = 1/3; 1e-6 is added to its root.
DEVIATION = math.sqrt(1 / 3) + 1e-6


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # 1 - (0 + 1)/2, 0 - (1 + 1)/2; equal rewards and a group of one: 0.
        ("rloo", [0.5, 0, -1, 0, 0, 0.5, 0]),
        ("dr_grpo", [1 / 3, 0, -2 / 3, 0, 0, 1 / 3, 0]),
        ("grpo", [1 / 3 / DEVIATION, 0, -2 / 3 / DEVIATION, 0, 0, 1 / 3 / DEVIATION, 0]),
        ("reinforce", [1, 0.1, 0, 0, 0.1, 1, 5]),
        # Less the batch's mean, 7.2 / 6 samples that count.
        ("reinforce with a baseline", [-0.2, -1.1, -1.2, 0, -1.1, -0.2, 3.8]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    name, _, baseline = estimator.partition(" ")
    found = group_advantages(REWARDS, GROUPS, COUNTS, name, batch_baseline=bool(baseline))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo"])
def test_equal_rewards_are_worth_exactly_nothing(estimator, dtype):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1; GRPO would divide the rounding error by itself."""
    rewards = torch.full((3,), 0.1, dtype=dtype)
    groups = torch.zeros(3, dtype=torch.int64)
    advantages = group_advantages(rewards, groups, torch.ones(3), estimator)
    assert advantages.tolist() == [0.0] * 3
    assert advantages.dtype == dtype


def test_signal():
    """DAPO drops the others. A sample that does not count has none and lends none."""
    expected = [True, False, True, False, False, True, False]
    assert has_reward_variance(REWARDS, GROUPS, COUNTS).tolist() == expected
    lonely = torch.tensor([1.0, 1, 0, 0, 1, 0, 1])
    assert not has_reward_variance(REWARDS, GROUPS, lonely).any()
    assert has_reward_variance(REWARDS[:0], GROUPS[:0], COUNTS[:0]).tolist() == []


TOKENS = torch.tensor(
    [[0.0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1]]
)


def test_advantages_go_to_generated_tokens():
    advantages = token_advantages(REWARDS, GROUPS, TOKENS, COUNTS, "rloo")
    expected = torch.tensor([0.5, 0, -1, 0, 0, 0.5, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected[:, None] * TOKENS)
    # Row 0 pays 0.5 over its two tokens: rewards ½, 0, 1 in group 7.
    penalty = torch.full(TOKENS.shape, NAN, dtype=torch.float64)
    penalty[TOKENS == 1] = 0.0
    penalty[0, 1:] = torch.tensor([0.2, 0.3], dtype=torch.float64)
    advantages = token_advantages(REWARDS, GROUPS, TOKENS, COUNTS, "dr_grpo", penalty=penalty)
    expected = torch.tensor([0.0, 0, -0.5, 0, 0, 0.5, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected[:, None] * TOKENS)


def test_reinforce_plus_plus_by_hand():
    """Discount ½. Row 0: token rewards -1, 4 - 1: returns ½, 3. Row 1: one token, 2 - 0.5 = 1.5.

    Returns (½, 3, 1½): mean 5/3, unbiased variance 19/12.
    """
    rewards = torch.tensor([4.0, 2.0, NAN], dtype=torch.float64)
    mask = torch.tensor([[0.0, 1, 1], [1, 0, 0], [1, 1, 1]])
    penalty = torch.tensor([[NAN, 1, 1], [0.5, NAN, NAN], [NAN] * 3], dtype=torch.float64)
    groups, counts = torch.tensor([0, 0, 1]), torch.tensor([1.0, 1, 0])
    options = {"penalty": penalty, "discount": 0.5}
    advantages = token_advantages(rewards, groups, mask, counts, "reinforce_plus_plus", **options)
    scale = 1 / math.sqrt(19 / 12 + 1e-8)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 1], expected[0, 2] = (0.5 - 5 / 3) * scale, (3 - 5 / 3) * scale
    expected[1, 0] = (1.5 - 5 / 3) * scale
    torch.testing.assert_close(advantages, expected)
    # Group of 3 and 1: ±1 over one and three tokens: mean -½, unbiased variance 1.
    rewards, groups = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([5, 5])
    mask, name = torch.tensor([[1.0, 0, 0], [1, 1, 1]]), "reinforce_plus_plus_baseline"
    advantages = token_advantages(rewards, groups, mask, torch.ones(2), name)
    scale = 1 / math.sqrt(1 + 1e-8)
    expected = torch.tensor([[1.5, 0, 0], [-0.5, -0.5, -0.5]], dtype=torch.float64) * scale
    torch.testing.assert_close(advantages, expected)


def test_overlong_penalty_and_discounted_returns_by_hand():
    lengths = torch.tensor([1, 6, 7, 9, 10, 10, 3])
    is_end = torch.tensor([True, True, True, True, True, False, False])
    expected = [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]
    assert soft_overlong_penalty(lengths, is_end, 10, 4).tolist() == expected
    # Without a cache only cut responses pay.
    penalty = soft_overlong_penalty(torch.tensor([9, 10, 10]), torch.tensor([1, 1, 0]), 10, 0)
    assert penalty.tolist() == [0.0, 0.0, -1.0]
    rewards = torch.tensor([[7.0, 1, 7, 4, 7]])
    mask = torch.tensor([[0.0, 1, 0, 1, 0]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[0, 3, 0, 4, 0]]
