"""Environments that cannot work are refused with the key and the remedy, and credit uses turns."""

import sys

import pytest
import torch
from recipes import composed

from aligner.algorithms.ppo.credit import Credit
from aligner.config import PromptSourceConfig, RSRunConfig, TrainerPPOConfig, load_config
from aligner.config.algorithms.trainer import (
    AdvantageConfig,
    ImproperEndConfig,
    RewardShapingConfig,
)
from aligner.config.commands.lengths import longest_lengths
from aligner.data.prompts import EpisodeDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError

BASE = ["model.restore_from_path=m.nemo", "data.train.source=t.jsonl"]
SINGLE = [*BASE, "reward.function=a.b:f"]
GAME = [*BASE, "reward=environment", "environment.factory=a.b:Game"]


def loaded(*overrides, script="gpt_ppo"):
    return load_config(composed(script, *GAME, *overrides))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["environment.factory=null"], r"reward=environment and environment.factory=my_game"),
        (["reward.function=a.b:f"], r"reward.function=a.b:f scores single responses"),
        (["environment.max_tokens=64"], "leaves no room for a prompt before a response of"),
        (["data.max_prompt_length=9"], "max_prompt_length=9: the environment provides"),
        (["trainer.ppo.reward.shift=1"], "would reward the number of turns"),
        (["trainer.ppo.reward.overlong_cache=1"], "applies to single responses"),
        (["trainer.ppo.advantage.credit=turn"], "turn needs an estimator that compares groups"),
        (["environment.memory_mb=63"], "must be between 64 and"),
        (["environment.max_turns=0"], "must be between 1 and 1000"),
    ],
)
def test_what_cannot_work_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        loaded(*overrides)


def test_conversations_one_step_ahead_need_a_correction():
    ahead = [
        *("generation.async_rollouts=true", "generation.backend=vllm", "cluster.engine=ray"),
        f"generation.vllm.python={sys.executable}",
    ]
    with pytest.raises(ConfigError, match="needs a correction"):
        loaded(*ahead)
    assert loaded(*ahead, "model.ppo.correction.weights=token").generation.async_rollouts


@pytest.mark.integration
def test_turns_need_an_environment():
    for key in ("timestep", "advantage.credit"):
        with pytest.raises(ConfigError, match=rf"trainer.ppo.{key}=turn needs conversations"):
            load_config(composed("gpt_ppo", *SINGLE, f"trainer.ppo.{key}=turn"))
    with pytest.raises(ConfigError, match=r"timestep=turn works only with gae"):
        loaded("trainer.ppo.timestep=turn", script="gpt_reinforce")
    with pytest.raises(ConfigError, match=r"reward=environment and environment.factory"):
        load_config(composed("gpt_rs", *SINGLE, "environment.factory=a.b:Game"), RSRunConfig)


def test_lengths_and_ground_truths_of_conversations(tmp_path):
    config = loaded("environment.max_tokens=200", "model.ppo.length_params.max_length=10")
    assert longest_lengths(config) == (190, 10)
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"secret": 3}\n{"prompt": "p", "x": null}\n')
    for column, truths in (("secret", [3, None]), (None, [None, None])):
        episodes = EpisodeDataset.read(PromptSourceConfig(str(rows)), 190, column)
        assert episodes.max_length == 190
        assert [episodes[n].ground_truth for n in range(2)] == truths
        columns = [episodes[n].columns for n in range(2)]
        assert columns == [{"secret": 3}, {"prompt": "p", "x": None}]


# Two conversations of two turns (tokens 1 and 3) and one that was cut after its first.
TURNS = torch.tensor([[0, 1, 0, 2], [0, 1, 0, 2], [0, 1, 0, 0]])
REWARDS = torch.tensor([[0.0, 1, 0, 5], [0, 2, 0, 0], [0, 3, 0, 0]])


def rollout(**columns):
    return BatchedDataDict(
        {
            "turn_ids": TURNS,
            "token_mask": (TURNS > 0).float(),
            "turn_rewards": REWARDS.clone(),
            "rewards": REWARDS.sum(1),
            "is_scored": torch.ones(3),
            "sample_mask": torch.ones(3),
            "is_end": torch.tensor([True, True, False]),
            **columns,
        }
    )


def credit(per_prompt=3, **options):
    trainer = TrainerPPOConfig(normalize_advantages=False, **options)
    return Credit(trainer, kl_in_reward=False, rollouts_per_prompt=per_prompt, max_length=4)


def test_rewards_of_turns_are_shaped_where_they_stand():
    batch = rollout()
    improper = ImproperEndConfig(mode="penalize", penalty=0.5)
    credit(reward=RewardShapingConfig(scale=2, clip=5), improper_end=improper).shape(batch)
    assert batch["shaped_turn_rewards"].tolist() == [[0, 2, 0, 5], [0, 4, 0, 0], [0, 4.5, 0, 0]]
    assert batch["shaped_rewards"].tolist() == [7, 4, 4.5]
    assert batch["sample_mask"].tolist() == [1, 1, 1]
    batch = rollout(sample_mask=torch.tensor([0.0, 1, 1]))
    credit(improper_end=ImproperEndConfig(mode="mask")).shape(batch)
    assert batch["sample_mask"].tolist() == [0, 1, 0]


def test_credit_with_a_critic_counts_in_turns():
    """γ = 0.5, λ = 1, no values: what follows the first turn weighs half, whatever its length."""
    for timestep, first in (("token", 1 + 0.25 * 5), ("turn", 1 + 0.5 * 5)):
        batch = rollout(values=torch.zeros(3, 4))
        batch["turn_ids"] = torch.tensor([[0, 1, 2, 2], [0, 1, 0, 2], [0, 1, 0, 0]])
        batch["token_mask"] = (batch["turn_ids"] > 0).float()
        how = credit(discount_factor=0.5, gae_lambda=1.0, timestep=timestep)
        how.shape(batch)
        how.assign(batch, 0.0)
        assert batch["advantages"][0, 1].item() == first
        assert batch["advantages"][:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("timestep", ["token", "turn"])
def test_whitening_and_explained_variance_count_tokens_or_turns(timestep):
    """Turns of one and three tokens; γ = λ = 1, and values that differ within a turn."""
    turns = torch.tensor([[0, 1, 0, 2, 2, 2], [0, 1, 1, 1, 0, 0], [1, 0, 0, 2, 0, 0]])
    values = torch.tensor([[9.0, 1, 9, 2, 4, -3], [9, 0, 2, 5, 9, 9], [1, 9, 9, 7, 9, 9]])
    rewards = torch.zeros(3, 6)
    rewards[0, 5], rewards[1, 3], rewards[2, 0], rewards[2, 3] = 3, 1, -2, 5
    batch = rollout(values=values)
    batch |= {"turn_ids": turns, "token_mask": (turns > 0).float(), "turn_rewards": rewards}
    trainer = TrainerPPOConfig(discount_factor=1.0, gae_lambda=1.0, timestep=timestep)
    how = Credit(trainer, kl_in_reward=False, rollouts_per_prompt=1, max_length=4)
    how.shape(batch)
    metrics = how.assign(batch, 0.0)[0]
    to_go = torch.tensor([[0.0, 3, 0, 3, 3, 3], [0, 1, 1, 1, 0, 0], [3, 0, 0, 5, 0, 0]])
    counted = turns > 0
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


@pytest.mark.parametrize(
    ("compared", "first", "second"),
    [("trajectory", [3.5, -2.5, -1.0], [3.5, -2.5, 0]), ("turn", [3.5, -2.5, -1.0], [5, -5, 0])],
)
def test_credit_without_a_critic_compares_conversations_or_turns(compared, first, second):
    batch = rollout()
    how = credit(advantage=AdvantageConfig(estimator="rloo", credit=compared))
    how.shape(batch)
    how.assign(batch, 0.0)
    assert batch["advantages"][:, 1].tolist() == first
    assert batch["advantages"][:, 3].tolist() == second
