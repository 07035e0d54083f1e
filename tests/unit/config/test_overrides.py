"""Overrides of the command line and of users' recipes are checked before hydra composes them."""

import sys

import pytest
import yaml
from recipes import CONF

from aligner.config import (
    DistillRunConfig,
    DPORunConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    ServeConfig,
    SFTRunConfig,
)
from aligner.config.cli import check_overrides, launch, without_sections
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.ppo.max_stepz=1", "Did you mean trainer.ppo.max_steps"),
        ("+model.ppo.entropy=1", "Did you mean model.ppo.entropy_bonus"),
        ("modle.micro_batch_size=1", "Did you mean model"),
        ("data.validation.sauce=1", "Did you mean data.validation.source"),
        ("model.optim.learning_rate=1e-6", r"Did you mean model\.optim\.lr\?"),
        ("model.ppo.length_params.max_new_tokens=9", "mean model.ppo.length_params.max_length"),
        ("learning_rate=1e-6", "Did you mean model.optim.lr"),
        ("batch_size=4", "Did you mean model.global_batch_size"),
        ("max_lenght=9", "Did you mean model.ppo.length_params.max_length"),
        ("model=1.5", "model is a group of settings"),
        ("environment.kwargs=[1]", "expected a mapping, got a list. Write environment.kwargs.NAME"),
        ("model={optim: [1]}", r"model\.optim: expected a mapping, got a list"),
        ("trainer.callbacks={a: 1}", r"expected a list, got a mapping. .*callbacks=\[VALUE\]"),
        ("data=[nan]", "Options: arithmetic"),
        ("critic=null", "critic is a group of settings"),
        (f"exp_manager={'x' * 5000}", "Options: default"),
        ("data=gsm8", "Did you mean gsm8k"),
        ("paralel@model=tensor2", "Did you mean parallel"),
        ("reward.function=a(b", "into inner quotes: 'reward.function=\"a\\(b\"'"),
        ("seed=1,2", "Write a list as"),
        ("recipes/ppo_tiny_cpu", "--config-name recipes/NAME"),
        ("=3", "the key is missing"),
        ("trainer.ppo.max_steps.first=1", "trainer.ppo.max_steps has no keys below it"),
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


def recipe(folder, *defaults, name="mine"):
    """The arguments that name a user's recipe with these defaults."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"defaults": [*defaults, "_self_"]}))
    return ["--config-dir", str(folder), f"--config-name={name}"]


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
    recipe(tmp_path, "/gpt_ppo", {"override /reward": "foo"}, name="parent")
    with pytest.raises(ConfigError, match=words):
        check_overrides(recipe(tmp_path, *defaults), RunConfig, CONF)


def test_a_users_recipe_may_use_options_of_its_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("# data\ntrain:\n  source: t.jsonl\n")
    defaults = ["/gpt_ppo", {"override /data": "mine"}, {"override /reward": "model"}]
    defaults += [{"override /parallel@model": "tensor2"}, {"override hydra/job_logging": "none"}]
    arguments = recipe(tmp_path, *defaults)
    given = [*arguments, "data=mine"]
    assert check_overrides(given, RunConfig, CONF) == given
    with pytest.raises(ConfigError, match=r"data=nine: .*Did you mean mine"):
        check_overrides([*arguments, "data=nine"], RunConfig, CONF)


def test_several_refused_options_of_a_recipe_are_one_table(tmp_path):
    arguments = recipe(tmp_path, "/gpt_ppo", {"override /data": "rewards"})
    table = rf"2 arguments cannot be used(.|\n)*  sead +1 .*seed.*\n  {tmp_path}/mine.yaml: data"
    with pytest.raises(ConfigError, match=rf"{table} +rewards +this is"):
        check_overrides([*arguments, "sead=1"], RunConfig, CONF)


def test_free_form_keys_groups_and_options_pass():
    untouched = [
        *("optim@model.optim=sgd", "data=gsm8k", "~model.peft", "hydra.run.dir=x"),
        *("--config-name=recipes/ppo_tiny_cpu", "--config-name", "recipes/ppo_tiny_cpu", "--help"),
    ]
    assert check_overrides(untouched, conf_dir=CONF) == untouched
    check_overrides(["data.train.arguments.size=3", "+reward.kwargs.anything=x"])
    given = ["optim@model.optim=sgd", "parallel@model=tensor2", "cluster=ray", "reward=model"]
    for root in (RunConfig, RSRunConfig):  # options that belong to no script
        assert check_overrides(given, root, CONF) == given


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
        *("data.train.source=t.jsonl", "trainer.ppo.advantage.estimator=grpo"),
        *("trainer.ppo.normalize_advantages=false", "model.ppo.num_rollouts_per_prompt=4"),
    ]
    with pytest.raises(SystemExit):
        launched(*critic_free)
    assert "critic=null" in capsys.readouterr().err
    assert launched(*critic_free, spelling).critic is None


def test_wrong_values_are_listed_with_unknown_keys():
    arguments = ["sead=1", "+model.optim.lr=abc", "trainer.precision=bf17", "data.shuffle=true"]
    with pytest.raises(
        ConfigError, match=r"(?s)3 arguments.*mean seed.*lr +abc +expected a number.*mean bf16"
    ):
        check_overrides(arguments)
    # Without an unknown key, the conversion lists the values, with those of the files.
    assert check_overrides(arguments[2:]) == [f"++{argument}" for argument in arguments[2:]]


def test_sections_that_cannot_be_null_are_refused():
    with pytest.raises(ConfigError, match=r"mean model\.restore"):
        check_overrides(["model.model_name_or_path=x"])
    arguments = ["data=null", "~reward", "model.peft=null", "seed=3", "critic=null"]
    assert without_sections(arguments, RunConfig) == (arguments[:-1], ["critic"])
    with pytest.raises(ConfigError, match=r"critic\.optim\.lr=1: its section is set to null"):
        without_sections(["critic=null", "critic.optim.lr=1"], RunConfig)


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


def test_escapes_in_double_quotes_are_characters_and_mappings_are_merged(launched):
    config = launched(
        "data.train.source=t.jsonl",
        r'model.ppo.sampling_params.end_strings=["\n", "a\tb", "\d"]',
        r"exp_manager.explicit_log_dir='\n'",
    )
    assert config.model.ppo.sampling_params.end_strings == ("\n", "a\tb", r"\d")
    assert config.exp_manager.explicit_log_dir == r"\n"
    config = launched("data=arithmetic", "+data.validation.source=v.jsonl")
    assert config.data.validation.source == "v.jsonl"
    assert config.data.validation.arguments["split"] == "validation"  # merged, as hydra merges


def test_a_variable_that_is_not_set_is_refused(launched, capsys):
    with pytest.raises(SystemExit) as ended:
        launched("data.train.source=${oc.env:ALIGNER_NOT_SET}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: data.train.source: cannot be resolved")
