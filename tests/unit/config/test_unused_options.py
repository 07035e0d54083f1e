"""An option that is set and that nothing reads is refused by name, with its condition."""

import pytest

from aligner.config import DPORunConfig, RunConfig, SFTRunConfig
from aligner.config.load import parse_config
from aligner.errors import ConfigError

MODEL = {"restore_from_path": "m.nemo"}
SAMPLING = {
    "model": MODEL,
    "data": {"train": {"source": "t.jsonl"}},
    "critic": {},
    "reward": {"function": "a.b:c"},
}
ENVIRONMENT = {
    **SAMPLING,
    "reward": {"kind": "environment"},
    "environment": {"factory": "a:B", "max_tokens": 400},
}
PAIRS = {"model": MODEL, "data": {"train": {"source": "t.jsonl"}}}
SUPERVISED = {"model": MODEL, "data": {"train": {"source": "t.jsonl"}, "messages_column": "m"}}


def with_value(values, key, value):
    first, _, rest = key.partition(".")
    below = values.get(first, {})
    return {**values, first: with_value(below, rest, value) if rest else value}


@pytest.mark.parametrize(
    ("root", "values", "key", "value"),
    [
        (RunConfig, ENVIRONMENT, "data.chat", True),
        (RunConfig, ENVIRONMENT, "data.system_prompt", "Add."),
        (RunConfig, ENVIRONMENT, "reward.kwargs", {"a": 1}),
        (RunConfig, SAMPLING, "environment.max_turns", 3),
        (RunConfig, SAMPLING, "environment.kwargs", {"a": 1}),
        (RunConfig, SAMPLING, "validation.temperature", 0.5),
        (RunConfig, SAMPLING, "generation.vllm.kwargs", {"max_num_seqs": 3}),
        (RunConfig, SAMPLING, "model.ppo.kl_loss.estimator", "k2"),
        (RunConfig, SAMPLING, "trainer.ppo.improper_end.penalty", 3.0),
        (RunConfig, SAMPLING, "model.peft.lora_tuning.adapter_dim", 4),
        (SFTRunConfig, SUPERVISED, "data.response_column", "r"),
        (DPORunConfig, PAIRS, "model.peft.lora_tuning.alpha", 4.0),
    ],
)
def test_an_option_that_nothing_reads_is_refused(root, values, key, value):
    parse_config(values, root)
    with pytest.raises(ConfigError, match="This run ignores it") as refusal:
        parse_config(with_value(values, key, value), root)
    assert key in str(refusal.value)


def test_all_of_them_are_named_at_once_and_others_accepted():
    values = with_value(SAMPLING, "environment.max_turns", 3)
    with pytest.raises(ConfigError) as refusal:
        parse_config(with_value(values, "validation.temperature", 0.5), RunConfig)
    assert "environment.max_turns=3" in str(refusal.value)
    assert "validation.temperature=0.5" in str(refusal.value)
    parse_config(with_value(ENVIRONMENT, "environment.max_turns", 3), RunConfig)
    validation = with_value(SAMPLING, "data.validation", {"source": "v.jsonl"})
    parse_config(with_value(validation, "validation.temperature", 0.5), RunConfig)


def test_a_key_that_may_change_at_resume_is_one_of_the_configuration():
    parse_config(with_value(SAMPLING, "exp_manager.resume_changed", ["model.ppo.loss"]), RunConfig)
    values = with_value(SAMPLING, "exp_manager.resume_changed", ["model.ppo.lss"])
    with pytest.raises(ConfigError, match=r"resume_changed: 'model\.ppo\.lss'"):
        parse_config(values, RunConfig)
