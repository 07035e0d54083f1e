"""The two GSM8K recipes are one recipe on two backends."""

from hydra import compose, initialize_config_dir
from test_conf import CONF

from aligner.config import load_config

NAME = "ppo_qwen2.5_1.5b_gsm8k_1n8g"


def composed(backend):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return load_config(compose(f"recipes/{NAME}_{backend}"))


def leaves(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}.{key}" if prefix else key)
    return found


def test_they_differ_in_the_backend_alone():
    megatron, dtensor = (leaves(composed(name).as_dict()) for name in ("megatron", "dtensor"))
    assert megatron.keys() == dtensor.keys()
    different = {key for key, value in megatron.items() if dtensor[key] != value}
    assert different == {"policy.backend", "exp_manager.explicit_log_dir"}


def test_they_are_what_the_reference_documents_state():
    config = composed("dtensor")
    assert (config.model.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert config.model.ppo.ppo_epochs == 1
    assert (config.trainer.num_nodes, config.trainer.devices) == (1, 8)
    assert config.reward.function == "aligner.rewards.math_verify:reward"
    assert config.data.train.source == "aligner.data.gsm8k:gsm8k_prompts"
    assert config.data.train.arguments["suffix"] == config.data.validation.arguments["suffix"]
