"""Advantages of groups, credit of turns, and the overlong penalty: by hand."""

import math
from random import Random

import pytest
import torch

from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.groups import (
    discounted_returns,
    group_advantages,
    soft_overlong_penalty,
    token_advantages,
    turn_advantages,
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


def test_gae_of_turns_by_hand():
    rewards = torch.tensor([[9.0, 1.0, 9.0, 2.0]])
    mask = torch.tensor([[0, 1, 0, 1]])
    kl = torch.tensor([[9.0, 0.5, 9.0, 1.0]])
    assert token_rewards(rewards, kl, mask, beta=1.0).tolist() == [[0.0, 0.5, 0.0, 1.0]]
    assert token_rewards(rewards, None, mask, beta=1.0).tolist() == [[0.0, 1.0, 0.0, 2.0]]
    # γ = 0.5, λ = 0.5; turns of two tokens and of one, a hole between them.
    # A_3 = 4 - 2 = 2. At the end of turn 1: δ = 1 + .5·2 - 3 = -1, A = -1 + .25·2 = -0.5; before
    # it, within the turn: δ = 0 + 3 - 1 = 2, A = 2 - 0.5 = 1.5.
    values = torch.tensor([[1.0, 3.0, NAN, 2.0, NAN]])
    rewards = torch.tensor([[0.0, 1.0, NAN, 4.0, NAN]])
    turns = torch.tensor([[1, 1, 0, 2, 0]])
    advantages, returns = generalized_advantage_estimate(
        values, rewards, turns > 0, 0.5, 0.5, turn_ids=turns
    )
    assert advantages.tolist() == [[1.5, -0.5, 0.0, 2.0, 0.0]]
    assert returns.tolist() == [[2.5, 2.5, 0.0, 4.0, 0.0]]


@pytest.mark.parametrize("length", [1, 2, 37])
def test_turns_of_one_token_are_tokens(length):
    generator = torch.Generator().manual_seed(length)
    values, rewards = torch.randn(2, 3, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, length, generator=generator) < 0.6
    turns = mask.long().cumsum(1) * mask
    one = generalized_advantage_estimate(values, rewards, mask, 0.9, 0.7, turn_ids=turns)
    other = generalized_advantage_estimate(values, rewards, mask, 0.9, 0.7)
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    whole = generalized_advantage_estimate(values, rewards, mask, 0.9, 0.7, turn_ids=mask.long())
    undiscounted = generalized_advantage_estimate(values, rewards, mask, 1.0, 1.0)
    torch.testing.assert_close(whole, undiscounted, atol=1e-12, rtol=1e-12)


# Three conversations of one prompt and one alone: rewards of turns 1, 2, 3.
EARNED = [[1.0, 2.0, 4.0], [3.0, 1.0], [0.0], [5.0, 5.0]]
CONVERSATIONS = torch.tensor([4, 4, 4, 7])


def tokens_of(earned, holes=1):
    """Turns of two tokens with holes between them, and their rewards at the second."""
    width = max(map(len, earned)) * (2 + holes)
    rewards, turns = torch.zeros(len(earned), width), torch.zeros(len(earned), width).long()
    for row, each in enumerate(earned):
        for turn, reward in enumerate(each):
            at = turn * (2 + holes)
            turns[row, at : at + 2] = turn + 1
            rewards[row, at + 1] = reward
    return rewards.double(), turns


def of_turns(advantages, turns):
    """The advantage of every turn; all of its tokens have it."""
    found = []
    for row, numbers in zip(advantages, turns, strict=True):
        each = [row[numbers == turn].unique() for turn in range(1, int(numbers.max()) + 1)]
        assert all(len(one) == 1 for one in each)
        found.append([one.item() for one in each])
    return found


def test_a_turn_is_compared_with_what_others_earned_from_the_same_turn_on():
    """Returns from turn 1 on: 7, 4, 0; from turn 2 on: 6, 1; from turn 3 on: 4, and 1 before."""
    rewards, turns = tokens_of(EARNED)
    found = turn_advantages(rewards, turns, CONVERSATIONS, torch.ones(4), "rloo")
    assert torch.equal(found[turns == 0], torch.zeros_like(found[turns == 0]))
    assert of_turns(found, turns) == [[5.0, 5.0, 3.0], [0.5, -5.0], [-5.5], [0.0, 0.0]]
    dr = turn_advantages(rewards, turns, CONVERSATIONS, torch.ones(4), "dr_grpo")
    torch.testing.assert_close(dr[:3], found[:3] * 2 / 3)
    grpo = turn_advantages(rewards, turns, CONVERSATIONS, torch.ones(4), "grpo")
    compared = ([7.0, 4.0, 0.0], [6.0, 1.0], [4.0, 1.0])
    deviation = max(torch.tensor(each, dtype=torch.float64).std() for each in compared) + 1e-6
    torch.testing.assert_close(grpo[:3], dr[:3] / deviation)
    plain = turn_advantages(rewards, turns, CONVERSATIONS, torch.ones(4), "reinforce")
    assert of_turns(plain, turns)[0] == [7.0, 6.0, 4.0]


def test_who_does_not_count_and_what_a_penalty_takes():
    rewards, turns = tokens_of(EARNED)
    rewards[1] = NAN
    found = turn_advantages(rewards, turns, CONVERSATIONS, torch.tensor([1, 0, 1, 1]), "rloo")
    assert of_turns(found, turns) == [[7.0, 6.0, 4.0], [0.0, 0.0], [-7.0], [0.0, 0.0]]
    rewards, turns = tokens_of([[1.0, 1.0], [0.0, 0.0]])
    penalty = torch.where(turns > 0, 0.25, NAN)
    penalty[0, 0] = 1.0
    groups, counts = torch.zeros(2).long(), torch.ones(2)
    found = turn_advantages(rewards, turns, groups, counts, "rloo", penalty=penalty)
    assert of_turns(found, turns) == [[1.25, 1.0], [-1.25, -1.0]]


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "reinforce"])
def test_conversations_of_one_turn_are_responses(estimator):
    rewards, turns = tokens_of([[1.0], [0.0], [1.0], [0.3], [0.3], [2.0]])
    rewards[0, 0] = 0.5  # before the last token of the turn
    groups, counts = torch.tensor([0, 0, 0, 1, 1, 2]), torch.ones(6)
    found = turn_advantages(rewards, turns, groups, counts, estimator)
    expected = group_advantages(rewards.sum(1), groups, counts, estimator)
    torch.testing.assert_close(found, torch.where(turns > 0, expected[:, None], 0.0))


def test_equal_returns_and_equal_sums():
    rewards, turns = tokens_of([[0.1, 0.7]] * 3)
    found = turn_advantages(rewards, turns, torch.zeros(3).long(), torch.ones(3), "grpo")
    assert found.abs().max() == 0
    # Turn 1 is worth 1 to both, turn 2 is worth 0 and 1.
    found = advantages_of([[1.0, 0.0], [0.0, 1.0]], "grpo", "turn")
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(found[:, 3:5], torch.tensor([[-expected], [expected]]).expand(2, 2))
    assert found[:, :2].abs().max() == 0


def advantages_of(earned, estimator, credit):
    """Of one group; ``earned``: rewards of each conversation's turns."""
    rewards, turns = tokens_of(earned)
    if credit == "trajectory":
        rewards = rewards.float().double().sum(1)
    groups, counts = torch.zeros(len(earned)).long(), torch.ones(len(earned))
    mask = (turns > 0).float()
    return token_advantages(rewards.float(), groups, mask, counts, estimator, turn_ids=turns)


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "grpo"])
def test_a_lone_longest_conversation_is_compared_with_the_last_turn_of_others(estimator):
    """All earned 1 at their end, so that nothing is learned of being longest."""
    found = advantages_of([[0.0, 1.0]] * 3 + [[0.0, 0.0, 1.0]], estimator, "turn")
    assert found.abs().max() == 0


@pytest.mark.parametrize(
    "parts", [[0.1, 0.2, 0.7], [0.1] * 8, [1.1, 2.3, 3.7, 0.9], [0.3, -0.1, 0.7, 100.2]]
)
def test_the_order_in_which_a_total_was_earned_is_no_difference(parts):
    """Credit of trajectories: exactly 0, also where the parts are added in float32."""
    random, earned = Random(1), []
    for _ in range(8):
        random.shuffle(parts)
        earned.append(list(parts))
    assert advantages_of(earned, "grpo", "trajectory").abs().max() == 0
    assert advantages_of([[0.1, 0.2, 0.0], [0.3]], "grpo", "trajectory").abs().max() == 0
    first = advantages_of(earned, "grpo", "turn")[:, :2]  # before turn 1 all are worth the same
    assert first.abs().max() == 0
