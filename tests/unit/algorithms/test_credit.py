"""Credit worked by hand, and rollouts filled with groups that teach."""

import math

import pytest
import torch

from aligner.algorithms.ppo.credit import Credit
from aligner.algorithms.ppo.dynamic_sampling import fill_with_varied_groups, rewards_differ
from aligner.config import TrainerPPOConfig
from aligner.config.algorithms.trainer import (
    AdvantageConfig,
    ImproperEndConfig,
    RewardShapingConfig,
)
from aligner.distributed.batched_data_dict import BatchedDataDict

PROMPT, WIDTH = 2, 6


def rollout(rewards, lengths, ended=None, first=0, kl=None):
    """Responses of the given lengths to prompts of two tokens; ``kl``: of each token."""
    rows = len(rewards)
    position = torch.arange(WIDTH)
    total = torch.tensor(lengths) + PROMPT
    ones = torch.ones(rows, WIDTH)
    logprobs = {} if kl is None else {"prev_logprobs": kl - ones, "ref_logprobs": -ones}
    return BatchedDataDict(
        {
            "input_ids": torch.arange(first, first + rows)[:, None].expand(-1, WIDTH).clone(),
            "input_lengths": total,
            "prompt_lengths": torch.full((rows,), PROMPT),
            "is_end": torch.tensor(ended or [True] * rows),
            "token_mask": ((position >= PROMPT) & (position < total[:, None])).float(),
            "sample_mask": torch.ones(rows),
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            **logprobs,
        }
    )


def credit(estimator="gae", by="trajectory", *, kl_in_reward=False, per_prompt=2, **options):
    """Credit of trajectories or turns; ``options``: of the trainer."""
    advantage = AdvantageConfig(estimator=estimator, credit=by)
    options = {"normalize_advantages": False, **options}
    trainer = TrainerPPOConfig(advantage=advantage, **options)
    return Credit(trainer, kl_in_reward, rollouts_per_prompt=per_prompt, max_length=4)


def assign(how, batch, beta=0.0):
    how.shape(batch)
    return how.assign(batch, beta)


def test_rewards_are_shaped():
    """A penalty comes off after the clip. A response that was cut off and masked earns nothing."""
    batch = rollout([1.0, 4.0], [1, 1], ended=[True, False])
    penalty, shaping = ImproperEndConfig("penalize", 0.5), RewardShapingConfig(2, -1, clip=3)
    credit("rloo", reward=shaping, improper_end=penalty).shape(batch)
    assert (batch["shaped_rewards"].tolist(), batch["sample_mask"].tolist()) == ([1, 2.5], [1, 1])
    batch = rollout([1, 0, 1, 0], [1, 4, 1, 1], ended=[True, False, True, True])
    assign(credit("rloo", improper_end=ImproperEndConfig(mode="mask")), batch)
    assert batch["sample_mask"].tolist() == [1, 0, 1, 1]
    assert batch["advantages"][:, PROMPT].tolist() == [0, 0, 1, -1]
    assert "returns" not in batch


def test_what_is_charged_by_hand():
    """Each token's KL is 0.1; the first response has 3 tokens, the second 1: 1 - 0.6, 0 - 0.2."""
    batch = rollout([1, 0], [3, 1], kl=0.1)
    metrics, kl = assign(credit("rloo", kl_in_reward=True), batch, beta=2.0)
    assert batch["advantages"][0, PROMPT].item() == pytest.approx(0.4 - -0.2)
    assert batch["advantages"][1, PROMPT].item() == pytest.approx(-0.2 - 0.4)
    assert kl == pytest.approx(0.2)  # (3 + 1) · 0.1 / 2
    assert metrics["train_rollouts/kl_penalty"] == pytest.approx(0.4)
    # Of 4 tokens the last 2 cost: 3 tokens pay a half, 4 pay 1, and so does the one cut off.
    batch = rollout([1, 1, 1, 1], [2, 3, 4, 1], ended=[True, True, True, False])
    how = credit("reinforce", reward=RewardShapingConfig(overlong_cache=2))
    metrics, _ = assign(how, batch)
    assert batch["advantages"][:, PROMPT].tolist() == [1, 0.5, 0, 0]
    assert metrics["train_rollouts/shaped_rewards"] == pytest.approx(0.375)
    # Rewards 1 and 0, of which 0.2 and 0 are charged: (0.8 - 0.4) / sqrt(0.5).
    batch = rollout([1, 0], [1, 1], kl=torch.tensor([[0.1], [0.0]]))
    assign(credit("grpo", kl_in_reward=True), batch, beta=2.0)
    expected = 0.4 / (math.sqrt(0.5) + 1e-6)
    assert batch["advantages"][:, PROMPT].tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_a_penalty_makes_no_signal(estimator):
    """Prompt A earns 1 and 0, prompt B twice the same, of which the KL's noise must not be made."""
    # The KL estimate is pure noise of 0.1 a token.
    noise = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    batch = rollout([1, 0, 1, 1], [2, 2, 2, 2], kl=0.1 * noise)
    metrics, _ = assign(credit(estimator, kl_in_reward=True), batch, beta=0.01)
    assert metrics["train_rollouts/samples_with_signal"] == 0.5
    raw = rollout([1, 0, 1, 1], [2, 2, 2, 2])
    assign(credit(estimator), raw)
    torch.testing.assert_close(batch["advantages"], raw["advantages"], rtol=0.02, atol=1e-4)
    assert batch["advantages"].abs().max() > 0.4


def draws(*rewards, ended=None, how=None):
    """A `draw` that gives as many prompts as it is asked for, one after the other."""
    supply = iter(rewards)
    how = how or credit("grpo")
    asked = []

    def draw(prompts):
        asked.append(prompts)
        first = sum(asked[:-1])
        rows = [reward for _ in range(prompts) for reward in next(supply)]
        ends = None if ended is None else ended[2 * first : 2 * (first + prompts)]
        batch = rollout(rows, [1] * len(rows), ends, first=2 * first)
        how.shape(batch)
        return batch

    draw.asked = asked
    return draw


def fill(draw, max_rollouts=3, left=None):
    return fill_with_varied_groups(
        draw,
        prompts=2,
        rollouts_per_prompt=2,
        max_rollouts=max_rollouts,
        prompts_left=lambda: 99 if left is None else left - sum(draw.asked),
        pad_id=0,
    )


@pytest.mark.parametrize(
    ("rewards", "options", "asked", "ids"),
    [
        # Of the second draw nothing is thrown away: it was asked for one prompt, then for another.
        ([(1, 1), (1, 0), (5, 5), (0, 1)], {}, [2, 1, 1], [2, 3, 6, 7]),
        ([(1, 1), (0, 0), (0, 1), (1, 1)], {"max_rollouts": 2}, [2, 2], [4, 5, 0, 1]),
        ([(1, 1), (0, 0), (0, 1)], {"left": 3}, [2, 1], [4, 5, 0, 1]),
        ([(1, 1), (0, 0)], {"max_rollouts": 1}, [2], [0, 1, 2, 3]),
    ],
    ids=["only what is missing", "filled up with the earliest", "no more than left", "no signal"],
)
def test_groups_that_are_drawn(rewards, options, asked, ids):
    draw = draws(*rewards)
    batch, drawn = fill(draw, **options)
    assert (draw.asked, drawn) == (asked, 2 * sum(asked))
    assert batch["input_ids"][:, 0].tolist() == ids


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        # The 0 of the first prompt was cut off; its group stays whole.
        ({"improper_end": ImproperEndConfig(mode="mask")}, (1, 0)),
        # Both right, one cut off and charged for it: DAPO draws another prompt.
        ({"improper_end": ImproperEndConfig(mode="penalize")}, (1, 1)),
        ({"reward": RewardShapingConfig(clip=1.0)}, (3, 2)),  # shaping takes the difference away
    ],
    ids=["masked", "charged", "clipped"],
)
def test_differences_that_are_no_signal(options, rewards):
    ended = [True, False, True, True, True, True]
    draw = draws(rewards, (1, 0), (0, 1), ended=ended, how=credit("grpo", **options))
    batch, _ = fill(draw)
    assert draw.asked == [2, 1]
    assert batch["input_ids"][:, 0].tolist() == [2, 3, 4, 5]
    assert batch["sample_mask"].tolist() == [1, 1, 1, 1]


def conversations(*rewards, ended=None):
    """Rewards of turns of one token each; two conversations for each prompt."""
    batch = rollout([sum(each) for each in rewards], [len(each) for each in rewards], ended)
    turns = (batch["token_mask"].cumsum(1) * batch["token_mask"]).long()
    earned = torch.zeros(batch["token_mask"].shape)
    for row, each in enumerate(rewards):
        earned[row, turns[row] > 0] = torch.tensor(each)
    ones = torch.ones(len(rewards))
    return BatchedDataDict({**batch, "turn_ids": turns, "turn_rewards": earned, "is_scored": ones})


@pytest.mark.parametrize(("by", "expected"), [("turn", [True, False]), ("trajectory", [False] * 2)])
def test_signal_is_what_the_estimator_compares(by, expected):
    """Equal sums, of prompt A in other turns; the question of metric and dynamic sampling."""
    batch = conversations([1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5])
    metrics, _ = assign(credit("rloo", by), batch)
    signal = batch["advantages"].view(2, -1).abs().amax(1) > 0
    assert signal.tolist() == expected
    assert metrics["train_rollouts/samples_with_signal"] == sum(expected) / 2
    assert rewards_differ(batch, 2, by).view(2, 2).tolist() == [[each] * 2 for each in expected]


def test_the_order_of_rewards_makes_no_signal():
    """Sums in float32 differ by 7.6e-6, which grpo makes advantages of full size of."""
    batch = conversations([0.3, -0.1, 0.7, 100.2], [100.2, 0.7, -0.1, 0.3])
    metrics, _ = assign(credit("grpo"), batch)
    assert metrics["train_rollouts/samples_with_signal"] == 0
    assert batch["advantages"].abs().max() == 0
    assert not rewards_differ(batch, 2).any()


def test_rewards_of_turns_are_shaped_where_they_stand():
    """The last conversation was cut off."""
    earned, ended = ([1.0, 5.0], [2.0, 0.0], [3.0]), [True, True, False]
    batch = conversations(*earned, ended=ended)
    improper = ImproperEndConfig(mode="penalize", penalty=0.5)
    shaping = RewardShapingConfig(scale=2, clip=5)
    credit(reward=shaping, improper_end=improper).shape(batch)
    assert batch["shaped_turn_rewards"][:, PROMPT:4].tolist() == [[2, 5], [4, 0], [4.5, 0]]
    assert batch["shaped_rewards"].tolist() == [7, 4, 4.5]
    assert batch["sample_mask"].tolist() == [1, 1, 1]
    batch = conversations(*earned, ended=ended) | {"sample_mask": torch.tensor([0.0, 1, 1])}
    credit(improper_end=ImproperEndConfig(mode="mask")).shape(batch)
    assert batch["sample_mask"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("timestep", ["token", "turn"])
def test_whitening_and_explained_variance_count_tokens_or_turns(timestep):
    """Turns of one and three tokens; γ = λ = 1, and values that differ within a turn."""
    numbers = torch.tensor([[0, 1, 0, 2, 2, 2], [0, 1, 1, 1, 0, 0], [1, 0, 0, 2, 0, 0]])
    values = torch.tensor([[9.0, 1, 9, 2, 4, -3], [9, 0, 2, 5, 9, 9], [1, 9, 9, 7, 9, 9]])
    rewards = torch.zeros(3, 6)
    rewards[0, 5], rewards[1, 3], rewards[2, 0], rewards[2, 3] = 3, 1, -2, 5
    batch = conversations([3.0], [1.0], [3.0]) | {"values": values, "turn_rewards": rewards}
    batch |= {"turn_ids": numbers, "token_mask": (numbers > 0).float()}
    options = {"discount_factor": 1.0, "gae_lambda": 1.0, "normalize_advantages": True}
    metrics, _ = assign(credit(timestep=timestep, **options), batch)
    to_go = torch.tensor([[0.0, 3, 0, 3, 3, 3], [0, 1, 1, 1, 0, 0], [3, 0, 0, 5, 0, 0]])
    counted = numbers > 0
    raw = (to_go - values)[counted]
    states = counted
    if timestep == "turn":
        states = torch.tensor([[0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]]) > 0
    over = (to_go - values)[states]
    expected = (raw - over.mean()) / over.std()
    torch.testing.assert_close(batch["advantages"][counted], expected)
    assert metrics["train_rollouts/advantages_mean"] == pytest.approx(over.mean().item())
    explained = 1 - over.var() / to_go[states].var()
    assert metrics["critic/explained_var"] == pytest.approx(explained.item())
    assert metrics["critic/values_max"] == values[states].max()
    assert metrics["train_rollouts/returns_mean"] == pytest.approx(to_go[states].mean().item())
