"""The first command of someone who arrives: a model alone, from a file or by its name."""

import pytest
import recipes
from ranks import run_script
from recipes import ROOT

from aligner.config.load import load_config, with_built_in_task
from aligner.config.run import RSRunConfig, RunConfig
from aligner.errors import ConfigError

REWARD = "aligner.examples.tasks.exact_number:reward"


def composed(name, *overrides):
    return recipes.composed(name, "model.restore_from_path=m.nemo", *overrides)


@pytest.mark.parametrize(
    ("name", "root"),
    [("gpt_ppo", RunConfig), ("gpt_reinforce", RunConfig), ("gpt_rs", RSRunConfig)],
)
def test_a_model_alone_learns_the_built_in_task(name, root):
    config = composed(name)
    note = with_built_in_task(config)
    assert "data.train.source=FILE.jsonl reward.function=FILE.py:FUNCTION" in note
    run = load_config(config, root)
    assert run.reward.function == REWARD
    assert run.data.train.source == "aligner.examples.tasks.arithmetic:arithmetic_prompts"
    assert run.data.validation.arguments["split"] == "validation"


def test_arithmetic_brings_its_reward():
    config = composed("gpt_ppo", "data=arithmetic", "data.train.arguments.size=64")
    assert with_built_in_task(config)
    run = load_config(config)
    assert (run.reward.function, run.data.train.arguments["size"]) == (REWARD, 64)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("data.train.source=d.jsonl", "reward.function"),
        ("reward.function=my.py:reward", "data.train.source"),
        ("reward=server", "data.train.source"),
    ],
)
def test_a_task_of_ones_own_is_not_completed(given, missing):
    config = composed("gpt_ppo", given)
    assert with_built_in_task(config) == ""
    with pytest.raises(ConfigError, match=missing):
        load_config(config)


def test_the_command_trains(tiny_nemo, tmp_path):
    """With its sizes cut down; data and reward are those of the command as it stands."""
    small = ["trainer.ppo.max_steps=1", "model.ppo.num_rollout_samples=8", "data.train.limit=64"]
    small += ["model.ppo.length_params.max_length=4", "trainer.ppo.val_check_interval=0"]
    small += ["++model.optim.bucket_cap_mb=200", "model.mcore_gpt=True"]
    small += ["data.validation.limit=8", f"exp_manager.explicit_log_dir={tmp_path}/run"]
    script = ROOT / "examples" / "train_gpt_ppo.py"
    done = run_script(script, f"model.restore_from_path={tiny_nemo}", *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[0].startswith("built-in task: arithmetic")
    ignored = "ignored, because no result depends on it here: model.optim.bucket_cap_mb"
    assert f"{ignored} Batches" in " ".join(done.stdout.split())
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
