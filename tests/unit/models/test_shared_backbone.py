"""A reward model on the critic's backbone: numbers of one of its own, one backbone in memory."""

import dataclasses
from pathlib import Path

import pytest
import recipes
import torch

from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import CriticConfig, ModelConfig, TrainedModelConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights, write_tiny_nemo
from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings, RunSettings
from aligner.models.value.workers.megatron_value_worker import MegatronValueWorker
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

CONF = Path(__file__).parents[3] / "conf"
BATCH = {"input_ids": torch.arange(24).reshape(3, 8), "input_lengths": torch.tensor([8, 3, 5])}


@pytest.fixture(scope="module")
def reward_nemo(tmp_path_factory):
    """A reward model of two attributes with weights of its own."""
    folder = tmp_path_factory.mktemp("reward")
    write_tiny_nemo(folder / "other.nemo", seed=5, scale=0.1)
    settings = RoleSettings(attributes=("first", "second"))
    model = load_from_nemo(MegatronGPTRewardModel, settings, restore_path=folder / "other.nemo")
    for parameter in model.gpt.rm_head.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(7))
    model.save_to(folder / "reward.nemo")
    return folder / "reward.nemo"


def bodies(*modules):
    """Numbers in distinct storages of the modules' parameters, heads aside."""
    parameters = [
        parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if "_head" not in name
    ]
    return sum(each.numel() for each in {each.data_ptr(): each for each in parameters}.values())


def test_one_body_two_models(tiny_nemo, reward_nemo):
    """Before and after an update, the critic is undisturbed and the rewards are the file's."""
    section = CriticConfig(micro_batch_size=3, global_batch_size=3)
    policy = ModelConfig(restore_from_path=str(tiny_nemo))
    tokenizer, run, parallel = byte_level_tokenizer(), RunSettings(), initialize_parallel()
    worker = MegatronValueWorker(section, tokenizer, model=policy, run=run, parallel=parallel)
    critic = worker.model
    critic.gpt.rm_head.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    critic.optimizer.copy_model_weights()
    alone = load_from_nemo(MegatronGPTRewardModel, restore_path=reward_nemo)
    worker.prepare_for_inference()
    values, one_body = worker.get_values(BATCH)["values"], bodies(critic)
    config = TrainedModelConfig(restore_from_path=str(reward_nemo), micro_batch_size=2)
    worker.share_backbone(config, tokenizer, run)
    assert worker.reward_attributes() == ("first", "second")
    expected = alone.infer(BATCH, 2)
    assert expected.std() > 0.1
    for _ in range(2):
        assert worker.get_rewards(BATCH, 2)["rewards"].equal(expected)
        assert worker.get_values(BATCH)["values"].equal(values)
    both = critic.infer_rm_critic(BATCH)
    assert both["values"].equal(values)
    torch.testing.assert_close(both["rewards"], expected)
    assert bodies(critic, worker._reward) == one_body
    assert bodies(critic, alone) == 2 * one_body


def test_what_goes_wrong_while_scoring_leaves_the_critic_its_body(tiny_nemo, reward_nemo):
    policy = ModelConfig(restore_from_path=str(tiny_nemo))
    worker = MegatronValueWorker(
        CriticConfig(), byte_level_tokenizer(), model=policy, parallel=initialize_parallel()
    )
    worker.prepare_for_inference()
    before = {name: value.clone() for name, value in worker.model.whole_weights().items()}
    config = TrainedModelConfig(restore_from_path=str(reward_nemo))
    worker.share_backbone(config, byte_level_tokenizer(), RunSettings())
    with pytest.raises(IndexError):
        worker.get_rewards({**BATCH, "input_ids": BATCH["input_ids"] + 1000})
    after = worker.model.whole_weights()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def ppo(folder, nemo, reward, *overrides, recipe="ppo_tiny_cpu"):
    """What two PPO steps report, times aside, and the policy they end with."""
    recipes.run(
        *(folder, nemo, recipe, "trainer.ppo.max_steps=2", "trainer.ppo.save_interval=0"),
        *("model.global_batch_size=8", "model.micro_batch_size=4"),
        *("model.ppo.num_rollout_samples=8", "data.train.arguments.size=32"),
        *("data.validation.arguments.size=8", "reward=model"),
        f"reward.model.restore_from_path={reward}",
        "reward.attribute_weights=[1.0,-0.5]",
        *overrides,
    )
    with open_nemo(folder / "policy.nemo") as checkpoint:
        return recipes.numbers(folder), dict(checkpoint.weights)


def test_a_run_is_the_same_to_the_bit(tmp_path, tiny_nemo, reward_nemo):
    share = "reward.model.share_body_with_critic=true"
    # Packed rows of the critic, padded ones of the reward model.
    settings = ["model.sequence_packing.enabled=true", "critic.global_batch_size=8"]
    apart = ppo(tmp_path / "apart", tiny_nemo, reward_nemo, *settings)
    shared = ppo(tmp_path / "shared", tiny_nemo, reward_nemo, *settings, share)
    assert shared[0] == apart[0]
    assert "critic/loss" in apart[0][1]
    assert shared[1].keys() == apart[1].keys()
    assert all(shared[1][name].equal(apart[1][name]) for name in apart[1])


def test_another_architecture_is_refused(tmp_path, tiny_nemo):
    wider = dataclasses.replace(TINY_ARCHITECTURE, hidden_size=128)
    weights = random_weights(wider) | {
        "rm_head.weight": torch.zeros(1, 128),
        "rm_head.bias": torch.zeros(1),
    }
    weights.pop("output_layer.weight")
    path = tmp_path / "wide.nemo"
    save_nemo(path, weights, wider, byte_level_tokenizer().files())
    with pytest.raises(ConfigError, match=r"differ in hidden_size \(128, 64\). Start both from"):
        ppo(
            tmp_path / "run",
            tiny_nemo,
            path,
            "critic.global_batch_size=8",
            "critic.micro_batch_size=8",
            "reward.attribute_weights=null",
            "reward.model.share_body_with_critic=true",
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.backend=dtensor", "needs megatron-core models, but policy.backend=dtensor"),
        ("reward.model.offload_weights=true", "offload_weights=true needs separate workers"),
        ("model.peft.peft_scheme=lora", "but model.peft.peft_scheme=lora"),
    ],
)
def test_what_cannot_share_is_refused(tmp_path, tiny_nemo, override, message):
    share = "reward.model.share_body_with_critic=true"
    with pytest.raises(ConfigError, match=message):
        ppo(tmp_path, tiny_nemo, "r.nemo", override, share)


def test_without_a_critic_there_is_no_body_to_share(tmp_path, tiny_nemo):
    share = "reward.model.share_body_with_critic=true"
    with pytest.raises(ConfigError, match="needs a critic, but this run has none"):
        ppo(tmp_path, tiny_nemo, "r.nemo", share, recipe="grpo_tiny_cpu")
