"""Dropout of a checkpoint: off where log-probs are compared, on where SFT goes on with it.

The model is a `.nemo` whose configuration lacks the keys, as old ones do: NeMo's 0.1 holds. With
the learning rate at about 0 the policy does not move, so the ratio to its own rollout is 1 and its
implicit reward over the reference 0; whatever else is seen is dropout.
"""

import dataclasses
import tarfile
from pathlib import Path

import pytest
import recipes
import yaml

from aligner.checkpoint.model_source import open_model
from aligner.config import OptimConfig, SFTRunConfig, load_config
from aligner.errors import ConfigError
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.role.settings import (
    RoleSettings,
    RunSettings,
    critic_settings,
    policy_settings,
)
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

STILL = ["model.optim.lr=1e-12", "exp_manager.save_nemo=false"]


@pytest.fixture(scope="module")
def old_nemo(tiny_nemo, tmp_path_factory) -> Path:
    """The tiny model in an unpacked file that does not say what is dropped."""
    folder = tmp_path_factory.mktemp("old") / "old"
    with tarfile.open(tiny_nemo) as tar:
        tar.extractall(folder, filter="data")
    (folder / "checksums.json").unlink()  # a member changes on purpose
    config = yaml.safe_load((folder / "model_config.yaml").read_text())
    del config["hidden_dropout"], config["attention_dropout"]
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize(("dropout", "still"), [("0", True), ("null", False)])
def test_the_ratio_of_a_policy_that_does_not_move_is_one(
    tmp_path, old_nemo, dropout, still, capsys
):
    # The second update compares with the rollout.
    options = [f"model.dropout={dropout}", "trainer.ppo.max_steps=1", "model.global_batch_size=32"]
    line = recipes.run(tmp_path, old_nemo, "grpo_tiny_cpu", *STILL, *options)[-1]
    assert (abs(line["train_optim/ppo_ratio_max"] - 1) < 1e-3) == still
    said = capsys.readouterr().out
    assert ("dropout as in the checkpoint: 0.1 of hidden states" in said) != still
    assert ("dropout 0 (in the checkpoint: 0.1 of hidden states" in said) == still


def test_the_policy_is_its_own_reference_in_preference_training(tmp_path, old_nemo):
    options = [*STILL, "trainer.dpo.max_steps=1"]
    line = recipes.run(tmp_path, old_nemo, "dpo_tiny_cpu", *options)[-1]
    assert line["train_optim/rewards_chosen"] == pytest.approx(0.0, abs=1e-5)
    assert line["train_optim/preference_loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize("script", ["ppo", "reinforce", "rs", "dpo", "reward", "distill", "sft"])
def test_only_fine_tuning_keeps_the_checkpoints(script):
    dropout = recipes.composed(f"gpt_{script}").model.dropout
    assert dropout == (None if script == "sft" else 0.0)


def test_roles_drop_what_they_are_told_and_files_keep_what_they_said(old_nemo):
    needed = [f"model.restore_from_path={old_nemo}", "data.train.source=x.jsonl"]
    tuned = load_config(recipes.composed("gpt_sft", *needed), SFTRunConfig)
    ppo = load_config(recipes.composed("gpt_ppo", *needed, "reward.function=a:b"))
    half = dataclasses.replace(ppo, model=dataclasses.replace(ppo.model, dropout=0.5))
    facts = RunSettings()
    for settings, cls, expected in [
        (policy_settings(tuned.model, facts), MegatronGPTActorModel, 0.1),
        (policy_settings(ppo.model, facts), MegatronGPTActorModel, 0.0),
        (critic_settings(ppo.critic, ppo.model, facts), MegatronGPTCriticModel, 0.0),
        (critic_settings(half.critic, half.model, facts), MegatronGPTCriticModel, 0.5),
    ]:
        role = load_from_nemo(cls, settings, restore_path=old_nemo)
        assert role.gpt.config.hidden_dropout == role.gpt.config.attention_dropout == expected
        assert role.architecture.hidden_dropout == 0.1  # what is written when it is saved


def test_the_twin_drops_as_it_is_told(old_nemo):
    def attention(dropout, **changes):
        with open_model(old_nemo) as source:
            settings = RoleSettings(dropout=dropout, **changes)
            role = DTensorActorModel(source, settings, initialize_parallel(), source.tokenizer)
        return role.model.layers[0].self_attn.attention_dropout

    assert (attention(None), attention(0.0)) == (0.1, 0.0)
    with pytest.raises(ConfigError, match=r"model\.dropout=0\.2: .*dropout of hidden states"):
        attention(0.2)
    with pytest.raises(
        ConfigError, match=r"model\.dropout=null, 0\.1 in the checkpoint: .*megatron"
    ):
        attention(None, optim=OptimConfig(lr=1e-3))
    assert attention(0.0, optim=OptimConfig(lr=1e-3)) == 0.0
