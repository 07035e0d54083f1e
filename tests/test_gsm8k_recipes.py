"""The two GSM8K recipes are one recipe on two backends, and what judges their runs."""

import re

import pytest
import recipes
from loaded import write_rows

from aligner.algorithms.run.identity import flat
from aligner.config import load_config
from aligner.examples import check_metrics
from aligner.observe.metrics import check_names

NAME = "ppo_qwen2.5_1.5b_gsm8k_1n8g"


# Settings of NeMo-RL as read on 2026-11-22, under the names here; its names in comments.
SETTINGS = {
    "model.ppo.num_rollout_samples": 1024,  # ppo.num_prompts_per_step
    "model.ppo.num_rollouts_per_prompt": 1,  # ppo.num_generations_per_prompt
    "trainer.ppo.max_epochs": 15,  # ppo.max_num_epochs
    "model.ppo.ppo_epochs": 1,  # ppo.ppo_epochs
    "trainer.ppo.improper_end.mode": "mask",  # ppo.overlong_filtering
    "trainer.ppo.discount_factor": 1.0,  # ppo.adv_estimator.gae_gamma
    "trainer.ppo.gae_lambda": 1.0,  # ppo.adv_estimator.gae_lambda_policy
    "trainer.ppo.normalize_advantages": True,  # ppo.adv_estimator.normalize_advantages
    "trainer.ppo.initial_policy_kl_penalty": 0.0,  # loss_fn.reference_policy_kl_penalty
    "model.ppo.ratio_eps": 0.2,  # loss_fn.ratio_clip_max
    "model.ppo.dual_clip": 3.0,  # loss_fn.ratio_clip_c
    "critic.value_clip": 0.5,  # value_loss_fn.cliprange
    "model.global_batch_size": 256,  # train_global_batch_size
    "critic.global_batch_size": 256,  # train_global_batch_size of the value
    "model.ppo.length_params.max_length": 512,  # max_new_tokens
    "model.ppo.sampling_params.temperature": 1.0,  # temperature
    "data.max_prompt_length": 512,  # max_input_seq_length
    "model.optim.lr": 1e-06,  # lr of the policy
    "model.optim.weight_decay": 0.01,  # weight_decay of the policy
    "model.optim.betas": [0.9, 0.999],  # betas of both
    "trainer.ppo.gradient_clip_val": 1.0,  # max_grad_norm
    "critic.optim.lr": 1e-05,  # lr of the value
    "critic.optim.weight_decay": 0.01,  # weight_decay of the value
    "seed": 42,  # ppo.seed
    # Of the reference documents.
    "trainer.ppo.max_steps": 100,
    "trainer.num_nodes": 1,
    "trainer.devices": 8,
    "reward.function": "aligner.rewards.math_verify:reward",
    "data.train.source": "aligner.examples.tasks.gsm8k:gsm8k_prompts",
}


def test_the_settings_are_those_of_nemo_rl_on_both_backends():
    trees = [recipes.composed(f"{NAME}_{backend}") for backend in ("megatron", "dtensor")]
    megatron, dtensor = (flat(load_config(tree).as_dict()) for tree in trees)
    assert megatron.keys() == dtensor.keys()
    different = {key for key, value in megatron.items() if dtensor[key] != value}
    assert different == {"policy.backend", "exp_manager.explicit_log_dir"}
    assert {key: megatron[key] for key in SETTINGS} == SETTINGS
    suffixes = {megatron[f"data.{part}.arguments.suffix"] for part in ("train", "validation")}
    assert len(suffixes) == 1


@pytest.fixture
def run_check(monkeypatch, capsys):
    """The script with these arguments: its status, and what it printed."""

    def run_check(*arguments):
        monkeypatch.setattr("sys.argv", ["check_metrics.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            check_metrics.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return run_check


def test_the_command_of_the_header_judges_a_run(tmp_path, run_check):
    """The thresholds at step 40, as the recipe's header gives them."""
    header = (recipes.CONF / "recipes" / f"{NAME}_megatron.yaml").read_text()
    conditions = re.findall(r'"([\w/]+ > [\d.]+)"', header)
    assert conditions == ["train_rollouts/rewards > 0.75", "val_rollouts/accuracy > 0.65"]
    names = [condition.split()[0] for condition in conditions]
    check_names(dict.fromkeys(names, 0.0))

    def judged(rewards, accuracy):
        line = {"step": 40, names[0]: rewards, names[1]: accuracy}
        write_rows(tmp_path / "metrics.jsonl", [{"step": 39, names[0]: 0.9}, line])
        return run_check(tmp_path, "--step", "40", *conditions)

    status, printed = judged(0.76, 0.66)
    assert status == 0
    assert "holds: val_rollouts/accuracy = 0.66 > 0.65" in printed
    for rewards, accuracy in ((0.75, 0.9), (0.9, 0.65), ("NaN", 0.9)):
        status, printed = judged(rewards, accuracy)
        assert status == 1
        assert printed.count("fails") == 1


def test_what_cannot_be_judged_is_said(tmp_path, run_check):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 39, "train_rollouts/rewards": 0.9}])
    (tmp_path / "empty").mkdir()
    condition = "train_rollouts/rewards > 0.75"
    for arguments, words in (
        ([tmp_path, "--step", "40", condition], "no step 40. The last step is 39"),
        ([tmp_path, "--step", "39", "val_rollouts/accuracy > 0"], "val_check_interval"),
        ([tmp_path, "--step", "39", "accuracy is good"], "not a condition"),
        ([tmp_path / "empty", "--step", "39", condition], "does not exist"),
    ):
        status, printed = run_check(*arguments)
        assert (status, words in printed) == (2, True), printed
