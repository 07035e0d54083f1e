"""What a run is: names and directories of algorithms, what may change at a resume and what not."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from test_run_directory import begun, configured, files_of, model, prepared, recipe  # noqa: F401

from aligner.algorithms.run.directory import RunDirectory
from aligner.algorithms.run.run import prepare_log_dir
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import RunConfig
from aligner.config.load import load_config
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import with_chat_template
from aligner.errors import ConfigError

ROOT = Path(__file__).parents[3]


def composed(*overrides):
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        common = [
            "model.restore_from_path=models/tiny.nemo",
            "reward.function=aligner.examples.tasks.exact_number:reward",
            "data.train.source=aligner.examples.tasks.arithmetic:arithmetic_prompts",
        ]
        return load_config(compose("gpt_reinforce", overrides=[*common, *overrides]), RunConfig)


E3 = "trainer.ppo.advantage.estimator"
DAPO = ["model.ppo.ratio_eps=[0.2,0.28]", "trainer.ppo.dynamic_sampling.enabled=true"]


@pytest.mark.parametrize(
    ("overrides", "name", "folder"),
    [
        ([f"{E3}=reinforce"], "REINFORCE", "reinforce"),
        ([f"{E3}=rloo"], "RLOO", "rloo"),
        ([f"{E3}=grpo", "model.ppo.loss_aggregation=sequence_mean"], "GRPO", "grpo"),
        ([f"{E3}=dr_grpo", "model.ppo.loss_aggregation=fixed_length"], "Dr. GRPO", "dr_grpo"),
        ([f"{E3}=reinforce_plus_plus"], "REINFORCE++", "reinforce_plus_plus"),
        (
            [f"{E3}=reinforce_plus_plus_baseline"],
            *("REINFORCE++ with a baseline", "reinforce_plus_plus_baseline"),
        ),
        ([f"{E3}=grpo", *DAPO], "DAPO", "dapo"),
        ([f"{E3}=grpo", "model.ppo.ratio_level=sequence"], "GSPO", "gspo"),
        ([f"{E3}=grpo", "model.ppo.surrogate=cispo"], "CISPO", "cispo"),
        ([f"{E3}=rloo", "model.ppo.ratio_level=sequence"], "RLOO (GSPO)", "rloo_gspo"),
    ],
)
def test_documented_algorithms_have_names_and_directories_of_their_own(overrides, name, folder):
    config = composed(*overrides)
    assert config.algorithm == name
    assert config.exp_manager.explicit_log_dir == f"results/{folder}"


@pytest.mark.parametrize("knows_identity", [True, False], ids=["new state", "old state"])
def test_gspo_does_not_continue_grpo(configured, knows_identity):  # noqa: F811
    begun(configured("grpo"), knows_identity=knows_identity)
    with pytest.raises(ConfigError, match="its algorithm is GRPO and this command's is GSPO"):
        prepared(configured("grpo", model__ppo__ratio_level="sequence"))


CHANGED = {
    "model.ppo.ratio_eps": 0.3,
    "model.ppo.loss_aggregation": "sequence_mean",
    "model.ppo.num_rollouts_per_prompt": 2,
    "model.ppo.sampling_params.temperature": 0.5,
    "model.ppo.kl_loss.coef": 0.5,
    "trainer.ppo.reward.scale": 2.0,
    "trainer.ppo.initial_policy_kl_penalty": 0.5,
    "trainer.ppo.gae_lambda": 0.5,
    "reward.kwargs.pattern": "x",
    "data.chat": True,
    "data.system_prompt": "Count.",
    "trainer.precision": "bf16",
}


@pytest.mark.parametrize("knows_identity", [True, False], ids=["new state", "old state"])
def test_what_defines_the_objective_changes_on_purpose_alone(configured, knows_identity):  # noqa: F811
    changes = {key.replace(".", "__"): value for key, value in CHANGED.items()}
    begun(configured("ppo"), knows_identity=knows_identity)
    with pytest.raises(ConfigError) as caught:
        prepared(configured("ppo", **changes))
    message = str(caught.value)
    assert "explicit_log_dir to another directory" in message
    for key, value in CHANGED.items():
        assert re.search(rf"\b{re.escape(key)}: [^,]* -> {re.escape(str(value))}", message), key
    names = re.search(r"exp_manager\.resume_changed=\[([^]]*)\]", message)[1].split(",")
    assert sorted(names) == sorted(CHANGED)
    for accepted in (names, {key.rpartition(".")[0] for key in CHANGED}):
        assert prepared(configured("ppo", **changes, exp_manager__resume_changed=[*accepted])) == []


FREE = {
    "trainer.ppo.max_steps": 7,
    "trainer.ppo.max_epochs": 3,
    "trainer.ppo.save_interval": 1,
    "model.global_batch_size": 32,
    "model.ppo.num_rollout_samples": 128,
    "model.ppo.rollout_micro_batch_size": 16,
    "model.optim.lr": 1e-5,
    "model.optim.sched.max_steps": 100,
    "model.sequence_packing.enabled": True,
    "trainer.devices": 2,
    "exp_manager.save_last_k": 5,
    "exp_manager.create_tensorboard_logger": False,
    "reward.time_limit_s": 5.0,
    "cluster.timeout_s": 60.0,
}


def test_sizes_saving_layout_and_waits_may_change(configured):  # noqa: F811
    folder = begun(configured("ppo"))
    before = files_of(folder)
    assert prepared(configured("ppo")) == []
    changes = {key.replace(".", "__"): value for key, value in FREE.items()}
    assert prepared(configured("ppo", **changes)) == []
    assert files_of(folder) == before


def test_a_changed_reward_is_seen_and_a_moved_one_is_the_same(configured, tmp_path):  # noqa: F811
    text = "def reward(prompts, responses, ground_truths):\n    return [1.0] * len(prompts)\n"
    first, moved = tmp_path / "mine.py", tmp_path / "elsewhere.py"
    first.write_text(text)
    moved.write_text(text)

    def scored_by(path, **more):
        return configured("ppo", reward__function=f"{path}:reward", reward__kwargs={}, **more)

    begun(scored_by(first))
    assert prepared(scored_by(first)) == []
    assert prepared(scored_by(moved)) == []
    first.write_text(text.replace("1.0", "0.0"))
    with pytest.raises(ConfigError, match=r"reward\.function was .*mine\.py.* another content"):
        prepared(scored_by(first))
    accepted = {"exp_manager__resume_changed": ["reward.function"]}
    assert prepared(scored_by(first, **accepted)) == []


def test_a_changed_module_of_the_users_is_seen(configured, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_own_rewards.py"
    module.write_text("def reward(prompts, responses, ground_truths):\n    return [1.0]\n")
    config = configured("ppo", reward__function="my_own_rewards:reward", reward__kwargs={})
    begun(config)
    assert prepared(config) == []
    module.write_text("def reward(prompts, responses, ground_truths):\n    return [0.0]\n")
    with pytest.raises(ConfigError, match=r"reward\.function was my_own_rewards:reward"):
        prepared(config)


def test_adapters_and_arguments_of_generators_are_part_of_it(configured):  # noqa: F811
    begun(configured("ppo"))
    change = {"data__train__arguments__high": 9}
    with pytest.raises(ConfigError, match=r"resume_changed=\[data\.train\.arguments\.high\]"):
        prepared(configured("ppo", **change))
    accepted = {"exp_manager__resume_changed": ["data.train.arguments.high"]}
    assert prepared(configured("ppo", **change, **accepted)) == []
    begun(configured("ppo"))
    lora = {"model__peft__peft_scheme": "lora"}
    with pytest.raises(ConfigError, match=r"peft_scheme: None -> lora"):
        prepared(configured("ppo", **lora))
    accepted = {"exp_manager__resume_changed": ["model.peft"]}
    assert prepared(configured("ppo", **lora, **accepted)) == []


GAME = {"kind": "messages", "factory": "aligner.examples.tasks.games:GuessingGame"}


def test_an_environment_s_settings_change_on_purpose_alone(configured):  # noqa: F811
    def played(changes, **more):
        environment = {**recipe("ppo")["environment"], **GAME, **changes}
        reward = {**recipe("ppo")["reward"], "kind": "environment", "function": None, "kwargs": {}}
        return configured("ppo", environment=environment, reward=reward, **more)

    begun(played({}))
    assert prepared(played({})) == []
    changes = {"kwargs": {"guesses": 2}, "unscored": "mask", "failed": "zero", "max_turns": 3}
    with pytest.raises(ConfigError) as caught:
        prepared(played(changes))
    names = re.search(r"exp_manager\.resume_changed=\[([^]]*)\]", str(caught.value))[1].split(",")
    assert {name.split(".")[1] for name in names} == changes.keys()
    for accepted in (names, ["environment"]):
        assert prepared(played(changes, exp_manager__resume_changed=accepted)) == []


TIMED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' + strftime_now('%Y-%m-%d %f') }}{% endif %}"
)
TOLD = (
    "from aligner.data.tokenizers.tokenizer import RunClock; "
    "print(RunClock.now().strftime('%Y-%m-%d %f'))"
)


@pytest.mark.integration
def test_templates_are_told_the_time_of_the_first_start(configured, tmp_path):  # noqa: F811
    template = tmp_path / "timed.jinja"
    template.write_text(TIMED)
    tokenizer = with_chat_template(byte_level_tokenizer(), template, key="x")

    def shown():
        return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])

    def started():
        with ExitStack() as closing:
            prepare_log_dir(config, closing)
            child = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True)
            assert shown().endswith(child.stdout.strip())
            (folder / "metrics.jsonl").touch()  # a run that wrote nothing leaves no directory
            return shown()

    config = configured("ppo")
    folder = Path(config.exp_manager.explicit_log_dir)
    first = started()
    assert started() == first
    assert shown() != first  # outside of the run it is the present
    began = RunDirectory(folder, RunStateStore(folder / "run_state")).start_time
    state = {"config": config.as_dict(), "learner": {}, "began": began}
    RunStateStore(folder / "run_state").save(2, state)
    (folder / "run.json").unlink()
    assert started() == first  # the run state knows it, too
