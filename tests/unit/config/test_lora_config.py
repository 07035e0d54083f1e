"""Settings of adapters: what they mean, and what is refused before anything is loaded."""

import pytest

from aligner.config import PeftConfig, RunConfig, parse_config
from aligner.config.load import check_config
from aligner.errors import ConfigError
from aligner.models.gpt.role.settings import (
    RunSettings,
    critic_settings,
    policy_settings,
    settings_to_continue,
)

LORA = {"peft_scheme": "lora"}


def run(peft, critic=None, **model):
    return parse_config(
        {
            "model": {"restore_from_path": "m.nemo", "peft": peft, **model},
            "critic": critic or {},
            "reward": {"function": "a.b:reward"},
            "data": {"train": {"source": "train.jsonl"}},
        },
        RunConfig,
    )


@pytest.mark.parametrize(
    ("peft", "model", "message"),
    [
        ({"peft_scheme": "ptuning"}, {}, r"model\.peft\.peft_scheme: must be one of lora"),
        ({"restore_from_path": "a"}, {}, r"peft_scheme is null. Set it to lora"),
        (LORA | {"lora_tuning": {"target_modules": []}}, {}, "no weight would be trained"),
        (LORA | {"lora_tuning": {"adapter_dim": 0}}, {}, r"adapter_dim: must be at least 1"),
        (LORA | {"lora_tuning": {"alpha": 0}}, {}, r"alpha: must be greater than 0"),
        (LORA | {"lora_tuning": {"adapter_dropout": 1.0}}, {}, "between 0 and 0.9"),
        (LORA, {"fp8": "e4m3"}, r"model\.fp8=e4m3 .* adapters .* Set model\.fp8=null"),
        (LORA, {"layer_spec": "transformer_engine"}, r"model\.layer_spec=transf.* Set .*=auto"),
        (
            LORA,
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
            r"model\.overlap_param_gather=true .*=lora.* Set .*=false",
        ),
        ({}, {"overlap_param_gather": True}, r"Set model\.overlap_grad_reduce=true too"),
        (
            LORA | {"lora_tuning": {"adapter_dropout": 0.1}},
            {"activations_checkpoint_granularity": "full"},
            r"adapter_dropout=0\.1: .* Set it to 0",
        ),
    ],
)
def test_refused(peft, model, message):
    with pytest.raises(ConfigError, match=message):
        run(peft, **model)


@pytest.mark.parametrize(
    ("tuning", "model", "message"),
    [
        ({}, {"tensor_model_parallel_size": 2}, r"size=2: .* not split adapters .* Set it to 1"),
        ({"adapter_dropout": 0.1}, {}, r"adapter_dropout=0\.1: .*dtensor .* Set it to 0"),
    ],
)
def test_the_dtensor_backend_refuses(tuning, model, message):
    values = run(LORA | {"lora_tuning": tuning}, **model).as_dict()
    with pytest.raises(ConfigError, match=message):
        parse_config({**values, "policy": {"backend": "dtensor"}}, RunConfig)


def test_null_is_all_weights_and_continuing_takes_the_adapters():
    config = run({})
    check_config(config)
    assert config.model.peft == PeftConfig()
    assert policy_settings(config.model, RunSettings()).lora is None
    settings = policy_settings(run(LORA).model, RunSettings())
    begun, whole = settings_to_continue(settings, "/run/policy.nemo")
    assert (begun.adapters_path, whole) == ("/run/policy.lora.safetensors", None)
    plain = policy_settings(run({}).model, RunSettings())
    assert settings_to_continue(plain, "/run/policy.nemo") == (plain, "/run/policy.nemo")


def test_the_critic_follows_and_begins_where_the_policy_does():
    peft = LORA | {"restore_from_path": "p.lora.safetensors"}
    config = run(peft)
    assert config.critic is not None
    policy = policy_settings(config.model, RunSettings())
    critic = critic_settings(config.critic, config.model, RunSettings())
    assert policy.lora == critic.lora == config.model.peft.lora_tuning
    assert policy.adapters_path == critic.adapters_path == "p.lora.safetensors"
    other = run(peft, critic={"restore_from_path": "c.nemo"})
    assert other.critic is not None
    assert critic_settings(other.critic, other.model, RunSettings()).adapters_path is None
