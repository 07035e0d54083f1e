"""Whole configurations of NeMo-RL and NeMo-Aligner as commands of this library."""

import re
import shlex

import pytest
from omegaconf import OmegaConf
from ranks import run_script
from recipes import ROOT, composed
from test_nemo_rl_sections import section

from aligner.catalog import ALGORITHMS
from aligner.config.cli import check_overrides
from aligner.config.load import load_config
from aligner.config.translation.command import translate
from aligner.errors import ConfigError

OURS = ["data.train.source=d.jsonl", "reward.function=r.py:f"]


def loaded(text, algorithm, *more):
    """The configuration that a printed command gives."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    command = shlex.split(" ".join(line.rstrip("\\") for line in lines))
    entry = ALGORITHMS[algorithm]
    assert command[:2] == ["aligner", f"train-{entry.name}"]
    overrides = check_overrides([*command[2:], *more], entry.root_class, ROOT / "conf")
    return load_config(composed(entry.config_name, *overrides), entry.root_class)


@pytest.fixture
def nemo_rl(tmp_path):
    base = {
        "policy": section("megatron", megatron_cfg__fp8_cfg={"enabled": False}),
        "grpo": {
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 16,
            "max_num_steps": 100,
            "val_period": 10,
            "overlong_filtering": False,
            "async_grpo": {"enabled": False, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.01, "ratio_clip_min": 0.2},
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
        "checkpointing": {"checkpoint_dir": "results/grpo", "save_period": 5},
    }
    base["loss_fn"]["ratio_clip_max"] = 0.28
    OmegaConf.save(OmegaConf.create(base), tmp_path / "base.yaml")
    own = tmp_path / "own.yaml"
    own.write_text(
        "defaults: base.yaml\n"
        "policy: {train_global_batch_size: '${mul:${grpo.num_prompts_per_step}, 2}', "
        'generation: {stop_strings: ["it\'s, one"]}}\n'
        "grpo: {max_num_steps: 7}\n"
        "data: {dataset_name: OpenMathInstruct-2}\n"
    )
    return own


def test_a_configuration_of_nemo_rl(nemo_rl, tmp_path):
    done = run_script(ROOT / "examples" / "translate.py", nemo_rl, folder=tmp_path)
    run = loaded(done.stdout, "reinforce", *OURS)
    assert run.policy.backend == "megatron"
    assert (run.trainer.ppo.max_steps, run.trainer.precision) == (7, "bf16")
    assert run.trainer.ppo.advantage.estimator == "grpo"
    ppo = run.model.ppo
    assert (ppo.num_rollout_samples, ppo.num_rollouts_per_prompt) == (512, 16)
    assert (tuple(ppo.ratio_eps), ppo.kl_loss.coef) == ((0.2, 0.28), 0.01)
    assert ppo.sampling_params.end_strings == ("it's, one",)
    assert (run.model.global_batch_size, run.model.micro_batch_size) == (64, 4)
    assert (run.model.optim.lr, run.model.optim.betas) == (5e-6, (0.9, 0.999))
    assert run.model.sequence_packing.enabled
    assert run.exp_manager.explicit_log_dir == "results/grpo"
    comments = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert comments[1].split()[1:3] == ["data.dataset_name", "OpenMathInstruct-2"]
    assert "policy.megatron_cfg.apply_rope_fusion" in comments[-1]


def test_what_is_refused_stands_in_the_table(nemo_rl):
    with nemo_rl.open("a") as file:
        file.write("loss_fn: {ratio_clip_c: 3, use_on_policy_kl_approximation: true}\n")
    text = translate(nemo_rl)
    assert re.search(r"loss_fn\.use_on_policy_kl_approximation +true ", text)
    assert "model.ppo.dual_clip=3" in text


def test_a_configuration_of_nemo_aligner(tmp_path):
    path = tmp_path / "gpt_rs_actor.yaml"
    path.write_text(
        "trainer: {devices: 1, accelerator: gpu, precision: bf16,\n"
        "  rs: {max_epochs: 2, trt_llm: {enable: false}}}\n"
        "pretrained_checkpoint: {restore_from_path: null}\n"
        "exp_manager: {explicit_log_dir: /results, name: rs}\n"
        "model:\n"
        "  mcore_gpt: true\n"
        "  rs: {num_rollouts_per_prompt: 4, top_n_rollouts: 1, num_rollout_samples: 32}\n"
        "  optim: {name: distributed_fused_adam, lr: 9e-7, bucket_cap_mb: 200}\n"
    )
    text = translate(path)
    run = loaded(text, "rs", "model.restore_from_path=m.nemo", *OURS)
    assert (run.trainer.rs.max_epochs, run.model.rs.num_rollouts_per_prompt) == (2, 4)
    assert (run.model.optim.name, run.model.optim.lr) == ("adam", 9e-7)
    row, ignored = [line for line in text.splitlines() if line.startswith("#")][1:]
    assert row.split()[1:3] == ["exp_manager.name", "rs"]
    assert ignored == "#  keys without effect here: model.optim.bucket_cap_mb"


def test_a_file_of_neither_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("trainer: {devices: 1}\n")
    with pytest.raises(ConfigError, match="trainer has none of the sections ppo, sft, dpo, rs, rm"):
        translate(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        translate(tmp_path / "absent.yaml")
