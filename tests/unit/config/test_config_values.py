"""Values that no setting can have are refused by key: infinities, NaN, numbers without end."""

import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.algorithms.distill.build import check_teacher
from aligner.checkpoint.adapters import adapter_shapes
from aligner.config import (
    DistillRunConfig,
    EvaluateConfig,
    GenerateConfig,
    LoraConfig,
    RunConfig,
    load_config,
    parse_config,
)
from aligner.config.fields import MOST_SECONDS, Fraction, NonNegative
from aligner.config.parse import build
from aligner.errors import CheckpointNotFoundError, ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

CONF = str((Path(__file__).parents[3] / "conf").resolve())


def ppo(*overrides):
    needed = ["model.restore_from_path=m.nemo", "data.train.source=d.jsonl", "reward.function=m:f"]
    with initialize_config_dir(config_dir=CONF, version_base="1.3"):
        return load_config(compose("gpt_ppo", overrides=[*needed, *overrides]))


@pytest.mark.integration
@pytest.mark.parametrize(
    "key",
    [
        *("model.optim.lr", "model.optim.weight_decay", "model.optim.sched.min_lr"),
        *("trainer.ppo.reward.scale", "trainer.ppo.reward.shift", "trainer.ppo.reward.clip"),
        *("trainer.ppo.improper_end.penalty", "model.ppo.entropy_bonus", "model.ppo.kl_loss.coef"),
        *("trainer.ppo.initial_policy_kl_penalty", "model.peft.lora_tuning.alpha"),
        *("reward.time_limit_s", "cluster.timeout_s", "model.ppo.sampling_params.temperature"),
    ],
)
def test_numbers_are_finite(key):
    for value in ("inf", "-inf", "nan", "9" * 400, "'1e999'", "''"):
        with pytest.raises(ConfigError, match=rf"^{key}: .*(finite|number)"):
            ppo(f"{key}={value}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"seed={2**64}", "seed: must fit 64 bits"),
        ("seed=1e300", "seed: must fit 64 bits"),
        ("trainer.ppo.max_steps=" + "9" * 400, "trainer.ppo.max_steps: must fit 64 bits"),
        ("model.optim.betas=[1.0,1.0]", r"betas\[0\]: must be between 0 and 1 \(exclusive\)"),
        ("reward.time_limit_s=1e300", r"reward.time_limit_s: must be between 0 and 2e\+06"),
        ("cluster.timeout_s=1e300", r"cluster.timeout_s: must be between 0 and 2e\+06"),
        ("trainer.max_time=00:00:99:99", r"trainer.max_time=00:00:99:99: expected"),
        ("trainer.max_time=" + "9" * 20 + ":00:00:00", "trainer.max_time=9.*: expected"),
        ("'reward.attribute_weights=[1.0,inf]'", r"attribute_weights\[1\]: must be a finite"),
    ],
)
def test_what_no_machine_can_count_is_refused(override, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        ppo(override.strip("'"))
    assert len(str(refusal.value)) < 400


def test_long_values_that_can_be_are_kept():
    config = ppo(f"seed={2**63 - 1}", "trainer.max_time=400:99:59:59", "reward.time_limit_s=1e6")
    assert config.seed == 2**63 - 1
    assert config.trainer.max_seconds == ((400 * 24 + 99) * 60 + 59) * 60 + 59
    assert build(Fraction, 1.0) == 1.0
    with pytest.raises(ConfigError, match="must be a finite number at least 0, got inf"):
        build(NonNegative, float("inf"))


@pytest.mark.parametrize("key", ["model.ppo.num_rollout_samples", "model.global_batch_size"])
def test_a_step_has_no_more_rows_than_a_process_can_list(key):
    with pytest.raises(ConfigError, match=rf"^{key}: must be between 1 and 1e\+06, got 10"):
        ppo(f"{key}=1000000000")


@pytest.mark.integration
@pytest.mark.parametrize(
    "key",
    [
        *("model.restore_from_path", "model.tokenizer", "model.peft.restore_from_path"),
        *("critic.restore_from_path", "exp_manager.explicit_log_dir", "generation.vllm.python"),
        *("data.train.source", "reward.function"),
    ],
)
def test_paths_are_not_empty(key):
    for blank in ("''", "' '"):
        with pytest.raises(ConfigError, match=rf"^{key}: empty, got {blank} \(str\). Give "):
            ppo(f"{key}={blank}")


def test_paths_of_other_commands_are_not_empty():
    model, data = {"restore_from_path": "m.nemo"}, {"prompts": {"source": "p.jsonl"}}
    train = {"model": model, "data": {"train": {"source": "d.jsonl"}}}
    asked = {"model": model, "data": data}
    second, file = {"train": {"source": ["a.jsonl", ""]}}, {"url": "h", "token_file": ""}
    for root, values, key in (
        (GenerateConfig, {**asked, "output": ""}, "output"),
        (GenerateConfig, {**asked, "model": {"restore_from_path": ""}}, "model.restore_from_path"),
        (GenerateConfig, {**asked, "data": {"sets": {"a": {"source": ""}}}}, "data.sets.a.source"),
        (EvaluateConfig, {**asked, "reward": {"function": "m:f"}, "output": ""}, "output"),
        (EvaluateConfig, {**asked, "reward": {}, "final_answer": ""}, "final_answer"),
        (DistillRunConfig, {**train, "teacher": model | {"restore_from_path": ""}}, "teacher.rest"),
        (RunConfig, {**train, "reward": {"server": {"url": ""}}}, "reward.server.url"),
        (RunConfig, {**train, "reward": {"server": file}}, "reward.server.token_file"),
        (RunConfig, {"model": model, "reward": {}, "data": second}, r"data.train.source\[1\]"),
    ):
        with pytest.raises(ConfigError, match=rf"^{key}.*: empty, got ''"):
            parse_config(values, root)


def test_prompts_may_be_empty():
    values = {"model": {"restore_from_path": "m.nemo"}, "prompt": [""]}
    config = parse_config({**values, "data": {"system_prompt": ""}}, GenerateConfig)
    assert (config.prompt, config.data.system_prompt) == (("",), "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("time_limit_s", seconds) for seconds in (math.inf, math.nan, 2 * MOST_SECONDS, 0.0)),
        ("max_concurrency", 0),
    ],
)
def test_limits_of_reward_functions(key, value):
    values = {"function": "a:b", key: value}
    with pytest.raises(ConfigError, match=rf"reward\.{key}: must be"):
        parse_config({"model": {"restore_from_path": "m.nemo"}, "reward": values}, RunConfig)


def test_adapters_larger_than_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"adapter_dim=1000000000 exceeds both .*linear_qkv"):
        adapter_shapes(TINY_ARCHITECTURE, LoraConfig(adapter_dim=10**9))
    assert adapter_shapes(TINY_ARCHITECTURE, LoraConfig(adapter_dim=32))


@pytest.mark.integration
def test_a_checkpoint_that_is_not_there_is_named_by_its_own_key(tiny_nemo):
    from aligner.models.value.workers.megatron_value_worker import MegatronValueWorkerImpl

    config = ppo("critic.restore_from_path=nope.nemo", f"model.restore_from_path={tiny_nemo}")
    with pytest.raises(CheckpointNotFoundError, match=r"nope.*. Check critic\.restore_from_path"):
        MegatronValueWorkerImpl(config.critic, None, model=config.model)
    with initialize_config_dir(config_dir=CONF, version_base="1.3"):
        needed = ["model.restore_from_path=m.nemo", "data.train.source=d.jsonl"]
        composed = compose("gpt_distill", [*needed, "teacher.restore_from_path=nope.nemo"])
    distill = load_config(composed, DistillRunConfig)
    with pytest.raises(CheckpointNotFoundError, match=r"nope.*. Check teacher\.restore_from_path"):
        check_teacher(distill, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.ppo.ratio_eps=x", "ratio_eps: expected a number, got 'x' .*, or expected a list"),
        ("model.ppo.ratio_eps=1.5", r"ratio_eps: must be between 0 and 1, got 1\.5 \(float\)$"),
        ("model.ppo.ratio_eps=[2,0.1]", r"ratio_eps\[0\]: must be between 0 and 1, got 2 "),
        ("model.ppo.ratio_eps=[x,0.1]", r"ratio_eps\[0\]: expected a number, got 'x' \(str\)$"),
        ("model.ppo.ratio_eps=[]", r"ratio_eps: expected a list of 2 values, got \[\] \(list\)$"),
        ("data.train.source=[d.jsonl,3]", r"source\[1\]: expected a string, got 3 \(int\)$"),
        ("trainer.callbacks=[{kwargs: {}}]", r"callbacks\[0\]\.callback: required and not set"),
        ("trainer.callbacks=[{calback: a:B}]", r"Did you mean trainer\.callbacks\[0\]\.callback\?"),
    ],
)
def test_of_several_kinds_the_one_that_was_meant_is_spoken_of(override, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        ppo(override)
    assert str(refusal.value).startswith(override.split("=")[0])
