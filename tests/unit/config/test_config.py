"""Every bad key or value is refused with its full dotted name and a remedy."""

import copy
import dataclasses
import re
import sys
from pathlib import Path

import pytest
import yaml

from aligner.architecture import GPTArchitecture
from aligner.config import (
    DistillRunConfig,
    DPORunConfig,
    ParallelConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    ServeConfig,
    SFTRunConfig,
    check_layout,
    parse_config,
)
from aligner.config.cli import check_overrides, launch, without_sections
from aligner.config.experiment import ExpManagerConfig
from aligner.config.parse import defaults_of, refuse, without_new_defaults
from aligner.config.roles.model import CriticConfig, ModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.errors import AlignerError, ConfigError, LayoutError

CONF = Path(__file__).parents[3] / "conf"
MINIMAL = {
    "model": {"restore_from_path": "m.nemo"},
    "reward": {"function": "a.b:reward"},
    "data": {"train": {"source": "train.jsonl"}},
}


def tree(**overrides):
    """MINIMAL with dotted keys set (``__`` stands for a dot)."""
    values = copy.deepcopy(MINIMAL)
    for key, value in overrides.items():
        *path, last = key.split("__")
        level = values
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
    return values


def test_minimal_configuration_gets_documented_defaults():
    config = parse_config(MINIMAL)
    assert config.model.ppo.ratio_eps_range == (0.2, 0.2)
    assert config.trainer.ppo.discount_factor == 1.0
    assert config.trainer.max_seconds is None
    assert config.critic.optim.lr == 1e-5


def test_what_is_not_a_default_is_what_was_given():
    given = tree(trainer__ppo__max_steps=7, data__train__arguments={"size": 3})
    config = parse_config(given)
    assert without_new_defaults(config.as_dict(), {}, defaults_of(config)) == given


def test_the_best_state_is_told_by_what_tells_something():
    """The share of a reward model's scores of at least 1 tells little, a verdict does."""
    assert parse_config(MINIMAL).monitor == "val_rollouts/accuracy"
    scored = {"reward__kind": "model", "reward__model": {"restore_from_path": "r.nemo"}}
    assert parse_config(tree(**scored)).monitor == "val_rollouts/accuracy"  # and a verifier
    scored["reward__function"] = None
    assert parse_config(tree(**scored)).monitor == "val_rollouts/rewards"
    asked = parse_config(tree(**scored, exp_manager__monitor="val_rollouts/accuracy"))
    assert asked.monitor == "val_rollouts/accuracy"


def test_configuration_is_frozen():
    config = parse_config(MINIMAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model__ppo__ratio_epss": 0.1}, ["model.ppo.ratio_epss", "model.ppo.ratio_eps?"]),
        ({"sead": 1}, ["sead: unknown key", "Did you mean seed?"]),
        ({"model__optim__sched__warmup": 3}, ["model.optim.sched.warmup", "warmup_steps"]),
        ({"trainer__precision": "fp8"}, ["trainer.precision", "32, bf16", "fp8"]),
        ({"trainer__ppo__kl_estimator": "k4"}, ["trainer.ppo.kl_estimator", "k1, k2, k3, abs"]),
        ({"trainer__ppo__gae_lambda": 1.5}, ["trainer.ppo.gae_lambda", "between 0 and 1", "1.5"]),
        ({"trainer__ppo__gae_lambda": float("nan")}, ["trainer.ppo.gae_lambda", "between 0 and 1"]),
        ({"model__optim__lr": 0}, ["model.optim.lr", "greater than 0"]),
        ({"model__optim__lr": "fast"}, ["model.optim.lr", "a number", "fast"]),
        ({"model__micro_batch_size": 2.5}, ["model.micro_batch_size", "an integer"]),
        ({"model__micro_batch_size": True}, ["model.micro_batch_size", "an integer"]),
        ({"seed": None}, ["seed", "an integer, got null"]),
        ({"model__optim__betas": [0.9]}, ["model.optim.betas", "list of 2"]),
        ({"model__ppo__ratio_eps": [0.1, 0.2, 0.3]}, ["model.ppo.ratio_eps", "list of 2"]),
        ({"model__ppo": 3}, ["model.ppo", "expected a group of keys"]),
        ({"model__ppo__dual_clip": 1.0}, ["model.ppo.dual_clip", "greater than 1"]),
        ({"trainer__max_time": "4h"}, ["trainer.max_time", "DD:HH:MM:SS"]),
        ({"cluster__address": "a:1"}, ["cluster.address=a:1", "local", "cluster.engine=ray"]),
        (
            {"cluster__engine": "ray", "cluster__value_workers": 2},
            ["cluster.value_workers=2", "cluster.colocated=false"],
        ),
        (
            {
                "cluster__engine": "ray",
                "cluster__value_workers": 3,
                "cluster__colocated": False,
                "model__tensor_model_parallel_size": 2,
            },
            ["cluster.value_workers=3", "multiple", "Use 4"],
        ),
        ({"cluster__object_store_mb": 8}, ["cluster.object_store_mb", "at least 80"]),
        ({"policy__backend": "jax"}, ["policy.backend", "jax", "dtensor"]),
        (
            {
                "policy__backend": "dtensor",
                "model__pipeline_model_parallel_size": 2,
                "trainer__devices": 2,
            },
            ["model.pipeline_model_parallel_size=2", "policy.backend=dtensor", "=1, or"],
        ),
        (
            {
                "policy__backend": "dtensor",
                "model__tensor_model_parallel_size": 2,
                "model__sequence_parallel": True,
                "trainer__devices": 2,
            },
            ["model.sequence_parallel=true", "Set model.sequence_parallel=false"],
        ),
        ({"generation__backend": "vllm"}, ["generation.backend=vllm", "megatron"]),
        (
            {"model__sequence_packing__enabled": True, "model__dynamic_batching__enabled": True},
            ["model.sequence_packing.enabled", "model.dynamic_batching.enabled", "exclude"],
        ),
        (
            {
                "model__sequence_packing": {"enabled": True, "train_mb_tokens": 1001},
                "model__context_parallel_size": 2,
                "trainer__devices": 2,
            },
            ["model.sequence_packing.train_mb_tokens=1001", "multiple of 4", "1000 or 1004"],
        ),
        (
            {
                "model__dynamic_batching": {"enabled": True, "logprob_mb_tokens": 64},
                "model__ppo__length_params": {"max_length": 60},
                "data__max_prompt_length": 10,
            },
            ["model.dynamic_batching.logprob_mb_tokens=64", "max_length=60", "at least 70"],
        ),
        ({"model__sequence_packing__algorithm": "best"}, ["model.sequence_packing.algorithm"]),
        (
            {"model__ppo__length_params": {"min_length": 9, "max_length": 8}},
            ["min_length=9", "max_length=8"],
        ),
        (
            {"model__ppo__num_rollout_samples": 96, "model__global_batch_size": 64},
            ["num_rollout_samples=96", "model.global_batch_size=64", "64 or 128"],
        ),
        (
            {"critic__global_batch_size": 48, "model__global_batch_size": 64},
            ["critic.global_batch_size=48", "48 or 96"],
        ),
        (
            {"model__ppo__num_rollouts_per_prompt": 7},
            ["num_rollout_samples=64", "num_rollouts_per_prompt=7", "63 or 70"],
        ),
        (
            {"model__micro_batch_size": 24},
            ["model.global_batch_size=64", "model.micro_batch_size=24", "48 or 72"],
        ),
        (
            {
                "critic": None,
                "trainer__ppo__advantage__estimator": "grpo",
                "model__ppo__num_rollouts_per_prompt": 4,
            },
            ["trainer.ppo.normalize_advantages=true", "estimator=grpo", "Set it to false"],
        ),
        (
            {
                "trainer__ppo__kl_controller__mode": "adaptive",
                "trainer__ppo__initial_policy_kl_penalty": 0,
            },
            ["kl_controller.mode=adaptive", "initial_policy_kl_penalty=0", "fixed"],
        ),
        (
            {"model__ppo__kl_loss": {"coef": 0.1, "estimator": "k1"}},
            ["model.ppo.kl_loss.estimator=k1", "k2", "k3"],
        ),
        (
            {
                "trainer__ppo__dynamic_sampling__enabled": True,
                "model__ppo__num_rollouts_per_prompt": 4,
                "model__optim__sched__name": "cosine",
            },
            ["model.optim.sched.name=cosine", "max_epochs", "Set model.optim.sched.max_steps"],
        ),
        ({"data__train__source": ""}, ["data.train.source", "empty"]),
        ({"model__restore_from_path": ""}, ["model.restore_from_path", ".nemo"]),
    ],
)
def test_refusals_name_key_value_and_remedy(overrides, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(**overrides))
    for word in words:
        assert word in str(caught.value)


def test_all_values_that_do_not_fit_are_named_at_once():
    values = tree(seed="x", model__optim__lrr=1, model__ppo__ratio_eps=[0.1], critic={"optim": 3})
    values["data"]["train"]["source"] = "???"
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    assert [message.split(": ")[0] for message in messages] == [
        *("- data.train.source", "- model.optim.lrr", "- model.ppo.ratio_eps"),
        *("- seed", "- critic.optim"),
    ]
    assert "Did you mean model.optim.lr?" in messages[1]
    assert "a list of 2 values, got [0.1]" in messages[2]


def test_all_broken_rules_are_named_at_once():
    values = tree(
        model__ppo={"length_params": {"min_length": 9, "max_length": 8}},
        trainer__ppo={"advantage": {"batch_baseline": True}, "reward": {"overlong_cache": 9}},
        cluster__address="a:1",
        validation__temperature=0.5,
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    for message, words in zip(
        messages,
        (
            "model.ppo.length_params.min_length=9",
            "trainer.ppo.advantage.batch_baseline=true",
            "trainer.ppo.reward.overlong_cache=9",
            "cluster.address=a:1",
            "validation.temperature=0.5",
        ),
        strict=True,
    ):
        assert message.startswith(f"- {words}")


@pytest.mark.parametrize("missing", ["model", "reward", "data"])
def test_required_groups(missing):
    values = {key: value for key, value in MINIMAL.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing}: required"):
        parse_config(values)


def test_errors_are_also_value_errors():
    with pytest.raises(ValueError):
        parse_config(tree(model__nonsense=1))
    assert issubclass(ConfigError, AlignerError)


def test_values_are_converted_where_that_loses_nothing():
    config = parse_config(
        tree(
            trainer__precision=32,
            model__optim__lr=1,
            model__ppo__ratio_eps=[0.2, 0.28],
            model__micro_batch_size=8.0,
            trainer__max_time="01:02:03:04",
        )
    )
    assert config.trainer.precision == "32"
    assert config.model.optim.lr == 1.0
    assert config.model.ppo.ratio_eps_range == (0.2, 0.28)
    assert config.model.micro_batch_size == 8
    assert config.trainer.max_seconds == 86400 + 2 * 3600 + 3 * 60 + 4


def test_batches_must_divide_over_data_parallel_ranks():
    config = parse_config(MINIMAL)  # global 64, micro 8
    refuse(config.share_problems(4, 4))
    with pytest.raises(ConfigError, match=r"8 x 3 data-.* = 24.*trainer.devices.*48 or 72"):
        refuse(config.share_problems(3, 4))


@pytest.mark.parametrize(
    ("samples", "devices", "batch", "micro_batch"),
    [
        (64, 1, 64, 8),
        (32, 1, 32, 8),
        (4, 1, 4, 4),
        (128, 1, 64, 8),
        (96, 4, 48, 6),  # the global batch is the same on one process
        (96, 1, 48, 8),
        (100, 1, 50, 5),
        (64, 16, 64, 4),
    ],
)
def test_batch_sizes_follow_the_rollout(samples, devices, batch, micro_batch):
    rollout = tree(model__ppo__num_rollout_samples=samples, trainer__devices=devices)
    config = parse_config(rollout)
    for role in (config.model, config.critic):
        assert (role.global_batch_size, role.micro_batch_size) == (batch, micro_batch)


def test_batch_sizes_that_are_given_stay():
    given = {"global_batch_size": 16, "micro_batch_size": 2}
    config = parse_config(tree(model__global_batch_size=16, critic=given))
    assert (config.model.global_batch_size, config.model.micro_batch_size) == (16, 8)
    assert (config.critic.global_batch_size, config.critic.micro_batch_size) == (16, 2)


def test_samples_that_no_batch_divides_are_not_learned_one_by_one():
    with pytest.raises(ConfigError, match="num_rollout_samples=127 is not a multiple"):
        parse_config(tree(model__ppo__num_rollout_samples=127))


def test_a_rollout_of_less_than_one_prompt_is_refused_by_its_key():
    model = {"restore_from_path": "m.nemo", "rs": {"num_rollouts_per_prompt": 128}}
    with pytest.raises(ConfigError, match=r"num_rollout_samples=64 is not a multiple of .*=128"):
        parse_config({**MINIMAL, "model": model}, RSRunConfig)


def test_batches_of_other_runs_follow_too():
    values = {key: value for key, value in tree().items() if key != "critic"}
    values["model"] |= {"rs": {"num_rollout_samples": 32}}
    model = parse_config(values, RSRunConfig).model
    assert (model.global_batch_size, model.micro_batch_size) == (8, 8)
    pairs = {"model": {"restore_from_path": "m.nemo", "global_batch_size": 6}}
    pairs["data"] = {"train": {"source": "pairs.jsonl"}}
    assert parse_config(pairs, DPORunConfig).model.micro_batch_size == 6


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        ("trainer.ppo.max_stepz=1", "trainer.ppo.max_steps"),
        ("+model.ppo.entropy=1", "model.ppo.entropy_bonus"),
        ("modle.micro_batch_size=1", "model"),
        ("data.validation.sauce=1", "data.validation.source"),
        ("model.optim.learning_rate=1e-6", r"model\.optim\.lr\?"),
        ("model.ppo.length_params.max_new_tokens=9", "model.ppo.length_params.max_length"),
        ("model.model_name_or_path=x", "model.restore_from_path"),
        ("learning_rate=1e-6", "model.optim.lr"),
        ("batch_size=4", "model.global_batch_size"),
        ("max_lenght=9", "model.ppo.length_params.max_length"),
    ],
)
def test_misspelt_overrides_are_refused_before_hydra(argument, suggestion):
    with pytest.raises(ConfigError, match=f"Did you mean {suggestion}"):
        check_overrides([argument])


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("model=1.5", "model is a group of settings"),
        ("data=[nan]", "Options: arithmetic"),
        ("critic=null", "critic is a group of settings"),
        (f"exp_manager={'x' * 5000}", "Options: default"),
        ("data=gsm8", "Did you mean gsm8k"),
        ("paralel@model=tensor2", "Did you mean parallel"),
        ("reward.function=a(b", "into inner quotes: 'reward.function=\"a\\(b\"'"),
        ("seed=1,2", "Write a list as"),
        ("recipes/ppo_tiny_cpu", "--config-name recipes/NAME"),
        ("=3", "names no key"),
        ("trainer.ppo.max_steps.first=1", "trainer.ppo.max_steps has no keys below it"),
        ("model.optim.learning_rate=1", "Did you mean model.optim.lr"),
        ("trainer.max_steps=1", "Did you mean trainer.ppo.max_steps"),
    ],
)
def test_what_hydra_cannot_take_is_refused_in_one_line(argument, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_overrides([argument], conf_dir=CONF)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("root", "argument", "options"),
    [
        (RunConfig, "data=examples", "Options: arithmetic, files, gsm8k. Single"),
        (RunConfig, "data=arithmetic_pairs", "Options: arithmetic, files, gsm8k. Single"),
        (RunConfig, "model=student", "Options: gpt. Single"),
        (SFTRunConfig, "+data=gsm8k", "Options: arithmetic_examples, examples. Single"),
        (SFTRunConfig, "critic=gpt", "Remove it"),
        (SFTRunConfig, "reward=model", "Remove it"),
        (RSRunConfig, "model=gpt", "Options: rs. Single"),
        (DPORunConfig, "data=rewards", "Options: arithmetic_pairs, preferences. Single"),
        (RewardRunConfig, "data=files", "Options: arithmetic_rewards, rewards. Single"),
        (DistillRunConfig, "model=trained", "Options: student. Single"),
        (ServeConfig, "exp_manager=default", "Remove it"),
    ],
)
def test_an_option_of_another_script_is_refused(root, argument, options):
    reason = f"{argument}: this is an option of other scripts, and this script does not read it. "
    with pytest.raises(ConfigError) as refusal:
        check_overrides([argument], root, CONF)
    assert str(refusal.value).startswith(reason + options)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        (["/gpt_ppo", {"override /data": "arithmetic_pairs"}], "data=arithmetic_pairs: this is an"),
        (["/gpt_ppo", {"override /data": "gsm8"}], r"data=gsm8: .*Did you mean gsm8k\?"),
        (["/gpt_ppo", {"override /model@model": "student"}], "model=student: this is an option"),
        (["/gpt_ppo", {"override /modle": "gpt"}], r"modle=gpt: no config group .*mean model\?"),
        (["/parent"], "parent.yaml: reward=foo: reward is a group of settings"),
    ],
)
def test_options_of_a_users_recipe_are_checked(tmp_path, defaults, words):
    """As on the command line: key, value, remedy, before hydra composes the recipe."""
    parent = {"defaults": ["/gpt_ppo", {"override /reward": "foo"}, "_self_"]}
    for name, content in (("mine", {"defaults": [*defaults, "_self_"]}), ("parent", parent)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=words):
        check_overrides(["--config-dir", str(tmp_path), "--config-name=mine"], RunConfig, CONF)


def test_a_users_recipe_may_use_options_of_its_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("# data\ntrain:\n  source: t.jsonl\n")
    defaults = ["/gpt_ppo", {"override /data": "mine"}, {"override /reward": "model"}]
    defaults += [{"override /parallel@model": "tensor2"}, {"override hydra/job_logging": "none"}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": [*defaults, "_self_"]}))
    arguments = ["--config-dir", str(tmp_path), "--config-name=mine", "data=mine"]
    assert check_overrides(arguments, RunConfig, CONF) == arguments
    with pytest.raises(ConfigError, match=r"data=nine: .*Did you mean mine"):
        check_overrides([*arguments[:3], "data=nine"], RunConfig, CONF)


def test_several_refused_options_of_a_recipe_are_one_table(tmp_path):
    recipe = {"defaults": ["/gpt_ppo", {"override /data": "rewards"}]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["--config-dir", str(tmp_path), "--config-name=mine", "sead=1"]
    with pytest.raises(ConfigError, match="2 arguments cannot be used") as caught:
        check_overrides(arguments, RunConfig, CONF)
    assert re.search(
        rf"  sead +1 .*seed.*\n  {tmp_path}/mine.yaml: data +rewards +this is", str(caught.value)
    )


@pytest.mark.parametrize("root", [RunConfig, RSRunConfig])
def test_an_option_that_belongs_to_no_script_is_accepted_by_all_that_have_the_group(root):
    given = ["optim@model.optim=sgd", "parallel@model=tensor2", "cluster=ray", "reward=model"]
    assert check_overrides(given, root, CONF) == given


def test_free_form_keys_groups_and_options_pass():
    untouched = [
        "optim@model.optim=sgd",
        "data=gsm8k",
        "~model.peft",
        "hydra.run.dir=x",
        "--config-name=recipes/ppo_tiny_cpu",
        "--config-name",
        "recipes/ppo_tiny_cpu",
        "--help",
    ]
    assert check_overrides(untouched, conf_dir=CONF) == untouched
    check_overrides(["data.train.arguments.size=3", "+reward.kwargs.anything=x"])


@pytest.fixture
def launched(monkeypatch):
    """``launched(*arguments)``: the configuration that a script's ``fit`` is given."""

    def run(*arguments):
        given = ["script.py", "model.restore_from_path=m.nemo", "reward.function=a.b:c", *arguments]
        monkeypatch.setattr("sys.argv", list(given))
        seen = []
        launch(lambda config: seen.append((config, list(sys.argv))), CONF, "gpt_ppo")
        assert seen[0][1] == given  # what a report shows as its command
        return seen[0][0]

    return run


@pytest.mark.integration
@pytest.mark.parametrize("spelling", ["critic=null", "+critic=null", "++critic=null", "~critic"])
def test_the_critic_is_removed_as_the_remedy_says(launched, spelling, capsys):
    """`SystemExit`: refused, with the remedy of ``aligner/config/algorithms/trainer.py`` first."""
    critic_free = [
        "data.train.source=t.jsonl",
        "trainer.ppo.advantage.estimator=grpo",
        "trainer.ppo.normalize_advantages=false",
        "model.ppo.num_rollouts_per_prompt=4",
    ]
    with pytest.raises(SystemExit):
        launched(*critic_free)
    assert "critic=null" in capsys.readouterr().err
    assert launched(*critic_free, spelling).critic is None


def test_sections_that_cannot_be_null_are_refused():
    arguments = ["data=null", "~reward", "model.peft=null", "seed=3", "critic=null"]
    assert without_sections(arguments, RunConfig) == (arguments[:-1], ["critic"])


def test_a_key_of_a_removed_section_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.optim\.lr=1: its section is set to null"):
        without_sections(["critic=null", "critic.optim.lr=1"], RunConfig)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [(["seed"], True), (["data.shuffle"], True), (["model.ppo.ratio_eps"], False), ([], False)],
)
def test_only_accepted_changes_of_data_or_seed_let_the_data_differ(changed, expected):
    assert ExpManagerConfig(resume_changed=tuple(changed)).data_may_change is expected


@pytest.mark.integration
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_any_key_can_be_set_with_and_without_a_plus(launched, plus):
    config = launched(
        "data.train.source=t.jsonl",
        f"{plus}data.validation.source=v.jsonl",  # null in the YAML
        "generation.backend=vllm",
        "cluster.engine=ray",
        f"generation.vllm.python={sys.executable}",
        f"{plus}generation.vllm.kwargs.max_num_seqs=3",  # an empty mapping there
        f"{plus}reward.kwargs={{partial: 0.2}}",
        f"{plus}data.train.arguments.size=500",
        f"{plus}seed=7",
    )
    assert config.data.validation.source == "v.jsonl"
    assert config.generation.vllm.kwargs == {"max_num_seqs": 3}
    assert config.reward.kwargs == {"partial": 0.2}
    assert config.data.train.arguments == {"size": 500}
    assert config.seed == 7


def test_escapes_in_double_quotes_are_characters(launched):
    """As in YAML, which the options' descriptions are written in."""
    sampling = "model.ppo.sampling_params"
    config = launched(
        "data.train.source=t.jsonl",
        rf'{sampling}.end_strings=["\n", "a\tb", "\d"]',
        r"exp_manager.explicit_log_dir='\n'",
    )
    assert config.model.ppo.sampling_params.end_strings == ("\n", "a\tb", r"\d")
    assert config.exp_manager.explicit_log_dir == r"\n"


def test_a_key_that_a_recipe_has_can_be_given_with_a_plus(launched):
    config = launched("data=arithmetic", "+data.validation.source=v.jsonl")
    assert config.data.validation.source == "v.jsonl"
    assert config.data.validation.arguments["split"] == "validation"  # merged, as hydra merges


def test_a_variable_that_is_not_set_is_refused(launched, capsys):
    with pytest.raises(SystemExit) as ended:
        launched("data.train.source=${oc.env:ALIGNER_NOT_SET}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: data.train.source: cannot be resolved")


def architecture(**changes):
    base = GPTArchitecture(
        num_layers=6,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_query_groups=3,
        kv_channels=64,
        vocab_size=100,
        max_position_embeddings=64,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("parallel", "world", "words"),
    [
        (ParallelConfig(tensor=2), 2, ["9 attention heads", "3 query groups", "1, 3"]),
        (ParallelConfig(pipeline=4), 4, ["6 layers", "3", "2, 3, 6"]),
        (ParallelConfig(tensor=3), 4, ["4 processes", "3", "3 or 6"]),
        (ParallelConfig(tensor=3), 2, ["2 processes", "Start 3"]),
        (ParallelConfig(sequence_parallel=True), 1, ["model.sequence_parallel=true"]),
        (ParallelConfig(expert=2), 2, ["no experts"]),
        (ParallelConfig(first_stage=2), 1, ["first_pipeline_stage=2", "4 of 6 layers"]),
        (ParallelConfig(pipeline=3, first_stage=3), 3, ["3 of 6 layers", "2 other stages"]),
        (ParallelConfig(pipeline=2, first_stage=6), 2, ["0 of 6 layers", "1 other stages"]),
        (ParallelConfig(pipeline=2, first_stage=2, last_stage=3), 2, ["1 of 6 layers"]),
    ],
)
def test_impossible_layouts_are_refused_with_numbers(parallel, world, words):
    with pytest.raises(LayoutError) as caught:
        check_layout(architecture(), parallel, world)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        (ParallelConfig(), 5),
        (ParallelConfig(tensor=3, sequence_parallel=True), 6),
        (ParallelConfig(tensor=3, pipeline=2), 6),
        (ParallelConfig(pipeline=2, last_stage=1), 2),
        (ParallelConfig(pipeline=4, first_stage=1, last_stage=1), 4),
        (ParallelConfig(pipeline=2, first_stage=2, last_stage=4), 2),
    ],
)
def test_possible_layouts_pass(parallel, world):
    check_layout(architecture(), parallel, world)


def test_experts_must_divide():
    moe = architecture(num_moe_experts=6)
    check_layout(moe, ParallelConfig(expert=3), 3)
    with pytest.raises(LayoutError, match="6 experts"):
        check_layout(moe, ParallelConfig(expert=4), 4)


def test_experts_under_tensor_parallelism():
    """Split like other layers, or whole where they are shared out; sequence parallelism always."""
    moe = architecture(num_moe_experts=6, moe_ffn_hidden_size=64)
    shared = ParallelConfig(tensor=3, expert=3, sequence_parallel=True)
    check_layout(moe, shared, 3)
    with pytest.raises(LayoutError, match="64 expert columns"):
        check_layout(moe, dataclasses.replace(shared, expert=1), 3)
    with pytest.raises(LayoutError, match=r"Set model\.sequence_parallel=true"):
        check_layout(moe, dataclasses.replace(shared, sequence_parallel=False), 3)


def test_a_critic_with_a_pipeline_of_its_own_has_equal_stages():
    policy = ModelConfig(
        "m.nemo", pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1
    )
    assert CriticConfig().with_layout(policy).parallel.first_stage == 1
    own = CriticConfig(pipeline_model_parallel_size=3).with_layout(policy).parallel
    assert (own.pipeline, own.first_stage) == (3, None)


def test_stages_and_routers_are_megatrons():
    for key, value in (("num_layers_in_last_pipeline_stage", 2), ("freeze_moe_router", True)):
        model = ModelConfig("m.nemo", **{key: value})
        check_policy_backend("megatron", model)
        with pytest.raises(ConfigError, match=f"model.{key}=.*policy.backend=megatron"):
            check_policy_backend("dtensor", model)
