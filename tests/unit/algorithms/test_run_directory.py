"""What a command finds in its directory: its own run, or a refusal, and nothing is ever lost.

What a run is: what may change at a resume and what not.
"""

import copy
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import cache, reduce
from pathlib import Path

import pytest
from loaded import write_rows
from newest_state import newest, snapshot
from omegaconf import OmegaConf
from recipes import composed
from settings import pairs

from aligner.algorithms.run.directory import RunDirectory
from aligner.algorithms.run.identity import RunIdentity, file_fingerprint
from aligner.algorithms.run.run import prepare_log_dir
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import DPORunConfig, RSRunConfig, RunConfig, SFTRunConfig
from aligner.config.load import parse_config
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import with_chat_template
from aligner.errors import CheckpointError, ConfigError

ROOTS = {"dpo": DPORunConfig, "kto": DPORunConfig, "sft": SFTRunConfig, "rs": RSRunConfig}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_nemo):
    path = tmp_path_factory.mktemp("models") / "a.nemo"
    shutil.copy(tiny_nemo, path)
    return path


@pytest.fixture
def configured(tmp_path, model):
    """``configured(kind, **changes)``: the configuration of a tiny recipe in one directory.

    Keys of ``changes`` have "." or "__" between their parts.
    """

    def configuration(kind, **changes):
        values = copy.deepcopy(recipe(kind))
        values["model"]["restore_from_path"] = str(model)
        values["exp_manager"]["explicit_log_dir"] = str(tmp_path / "run")
        for key, value in changes.items():
            *path, name = key.replace("__", ".").split(".")
            reduce(dict.__getitem__, path, values)[name] = value
        return parse_config(values, ROOTS.get(kind, RunConfig))

    return configuration


@cache
def recipe(kind):
    return OmegaConf.to_container(composed(f"{kind}_tiny_cpu"), resolve=True)


def prepared(config) -> list[str]:
    folder = Path(config.exp_manager.explicit_log_dir)
    directory = RunDirectory(folder, RunStateStore(folder / "run_state"))
    return directory.prepare(RunIdentity.of(config), config)


def refused(config, words=None, error=ConfigError) -> str:
    """The message of the error with which a command of ``config`` is refused."""
    with pytest.raises(error, match=words) as caught:
        prepared(config)
    return str(caught.value)


def begun(config, *, saved=(2, 4), steps=5, knows_identity=True) -> Path:
    """What such a run leaves that was killed; ``saved``: the steps of its run states."""
    folder = Path(config.exp_manager.explicit_log_dir)
    prepared(config)
    store = RunStateStore(folder / "run_state", save_last_k=2)
    identity = {"identity": RunIdentity.of(config).as_dict()} if knows_identity else {}
    for step in saved:
        store.save(step, {"config": config.as_dict(), "learner": {}, **identity})
        RunDirectory(folder, store).mark_saved()
    write_rows(folder / "metrics.jsonl", [{"step": step} for step in range(steps + 1)])
    return folder


@pytest.mark.parametrize("knows_identity", [True, False], ids=["new state", "old state"])
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("ppo", "grpo", "PPO and the algorithm of this command is GRPO"),
        ("rloo", "sft", "RLOO and the algorithm of this command is Fine-tuning"),
        ("dpo", "kto", "(DPO) and the algorithm of this command is Preference optimisation (KTO)"),
    ],
)
def test_another_algorithm_is_refused(configured, first, second, words, knows_identity):
    folder = begun(configured(first), knows_identity=knows_identity)
    before = snapshot(folder)
    message = refused(configured(second))
    for part in (words, "step_000004", "explicit_log_dir", "start_anew=true", "earlier_001"):
        assert part in message
    assert snapshot(folder) == before


def test_an_estimator_may_be_changed_on_purpose_and_a_critic_may_not(configured):
    accepted = {"exp_manager.accept_changed": ["algorithm"]}
    begun(configured("grpo"))
    refused(configured("rloo"), r"accept_changed=\[algorithm\]")
    assert prepared(configured("rloo", **accepted)) == []
    message = refused(
        configured("ppo", **accepted), "GRPO and the algorithm of this command is PPO"
    )
    assert "accept_changed" not in message


def test_a_model_may_be_moved_and_another_one_is_refused(configured, model, tmp_path):
    begun(configured("ppo"))
    moved, other = tmp_path / "moved.nemo", tmp_path / "other.nemo"
    content = bytearray(model.read_bytes())
    moved.write_bytes(content)
    content[len(content) // 2] ^= 1
    other.write_bytes(content)
    assert prepared(configured("ppo", model__restore_from_path=str(moved))) == []
    changed = {"model.restore_from_path": str(other)}
    words = r"other\.nemo has different content.*changed=\[model\]"
    refused(configured("ppo", **changed), words)
    assert prepared(configured("ppo", **changed, exp_manager__accept_changed=["model"])) == []


def test_data_may_be_moved_and_other_data_are_refused(configured, tmp_path):
    train, moved, other = (tmp_path / f"{name}.jsonl" for name in ("train", "moved", "other"))
    rows = [{"prompt": f"{n}+1=", "ground_truth": "1"} for n in range(4)]
    for path in (train, moved):
        write_rows(path, rows)
    write_rows(other, rows[::-1])  # as many

    def taking(path, **more):
        source = {"source": str(path), "arguments": {}}
        return configured("ppo", data__train=source, **more)

    begun(taking(train))
    assert prepared(taking(moved)) == []
    refused(taking(other), r"train\.jsonl, but data\.train\.source=.*other\.jsonl")
    assert prepared(taking(other, exp_manager__accept_changed=["data"])) == []
    refused(configured("ppo"), r"accept_changed=\[data\]")  # a generator


def damage_manifests(folder):
    for path in folder.glob("run_state/*/manifest.json"):
        path.write_text("{")


def remove_states(folder):
    shutil.rmtree(folder / "run_state")


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (damage_manifests, ["step_000002 is damaged", "step_000004 is damaged"]),
        (remove_states, ["up to step 5", "Copy run_state/ back"]),
    ],
)
def test_a_run_whose_states_are_lost_is_refused_until_a_new_one_is_asked_for(
    configured, lose, words
):
    folder = begun(configured("ppo"))
    lose(folder)
    before = snapshot(folder)
    message = refused(configured("ppo"), error=CheckpointError)
    for part in (*words, "start_anew=true", "explicit_log_dir"):
        assert part in message
    assert snapshot(folder) == before
    (note,) = prepared(configured("ppo", exp_manager__start_anew=True))
    assert str(folder / "earlier_001") in note
    assert snapshot(folder / "earlier_001") == before
    left = {path.name for path in folder.iterdir()}
    assert left - {".lock"} == {"earlier_001", "run.json"}


@pytest.mark.parametrize("has_written", [False, True])
def test_a_run_that_ends_before_its_first_line_leaves_no_directory(configured, has_written):
    config = configured("ppo")
    folder = Path(config.exp_manager.explicit_log_dir)
    with ExitStack() as closing:
        prepare_log_dir(config, closing)
        assert (folder / "run.json").exists()
        if has_written:
            (folder / "metrics.jsonl").touch()
    assert folder.exists() == has_written
    # The directory of another command stays.
    folder.mkdir(exist_ok=True)
    with ExitStack() as closing:
        prepare_log_dir(config, closing)
    assert (folder / "run.json").exists()


def test_history_without_a_record_is_not_truncated_and_a_directory_is_needed(configured):
    folder = begun(configured("ppo"), saved=())
    (folder / "run.json").unlink()
    refused(configured("ppo"), "no run state to continue from", CheckpointError)
    with pytest.raises(ConfigError, match=r"exp_manager\.explicit_log_dir: empty"):
        configured("ppo", exp_manager__explicit_log_dir="")


def test_a_run_killed_before_its_first_save_begins_again_and_its_lines_are_kept(configured):
    folder = begun(configured("ppo"), saved=())
    lines = (folder / "metrics.jsonl").read_bytes()
    for number in (1, 2):
        (note,) = prepared(configured("ppo"))
        assert "no run state had been saved" in note
        assert (folder / f"earlier_00{number}" / "metrics.jsonl").read_bytes() == lines
        (folder / "metrics.jsonl").write_bytes(lines)
    assert begun(configured("ppo"), saved=(), steps=0) == folder
    assert prepared(configured("ppo")) == []  # only the validation before step 1


def test_a_new_run_beside_everything_else(configured):
    """Two runs, one directory; what the user put there stays where it is."""
    folder = begun(configured("ppo"))
    (folder / "notes.txt").write_text("mine")
    (folder / "policy.nemo").write_text("a model")
    prepared(configured("sft", exp_manager__start_anew=True))
    begun(configured("sft"))
    assert (folder / "notes.txt").exists()
    assert (folder / "earlier_001" / "policy.nemo").exists()
    prepared(configured("ppo", exp_manager__start_anew=True))
    assert {path.name for path in folder.glob("earlier_*")} == {"earlier_001", "earlier_002"}
    assert newest(RunStateStore(folder / "earlier_001" / "run_state"))


@pytest.mark.parametrize("saved", [(2,), ()])
def test_without_resume_a_run_is_left_alone(configured, saved):
    folder = begun(configured("ppo"), saved=saved)
    before = snapshot(folder)
    config = configured("ppo", exp_manager__resume_if_exists=False)
    refused(config, r"resume_if_exists=false, but .* contains a run.*start_anew")
    assert snapshot(folder) == before


def test_without_resume_the_newest_damaged_state_is_named_where_metrics_are_missing(configured):
    folder = begun(configured("ppo"))
    damage_manifests(folder)
    config = configured("ppo", exp_manager__resume_if_exists=False)
    refused(config, r"newest: metrics up to step 5\)")
    for path in folder.glob("*.jsonl"):
        path.unlink()
    refused(config, r"newest: .*step_000004 is damaged")


def test_a_damaged_state_leaves_the_question_to_the_one_before(configured):
    folder = begun(configured("ppo"))
    path = folder / "run_state" / "step_000004" / "state.json"
    path.write_bytes(b"x" * path.stat().st_size)
    assert prepared(configured("ppo")) == []
    refused(configured("grpo"), "step_000002")


def test_blocks_of_a_large_file_tell_it_from_another(tmp_path):
    content = bytearray(os.urandom(6 << 20))
    path = tmp_path / "large"
    found = set()
    for change in (None, 0, len(content) - 1, len(content) // 2):
        changed = bytearray(content)
        if change is not None:
            start = change - change % 4096
            changed[start : start + (1 << 17)] = bytes(len(changed[start : start + (1 << 17)]))
        path.write_bytes(changed)
        found.add(file_fingerprint(path))
    assert len(found) == 4
    path.write_bytes(content + b"x")
    assert file_fingerprint(path) not in found


CHANGED = pairs(
    "model.ppo.ratio_eps=0.3 model.ppo.loss_aggregation=sequence_mean "
    "model.ppo.num_rollouts_per_prompt=2 model.ppo.sampling_params.temperature=0.5 "
    "model.ppo.kl_loss.coef=0.5 trainer.ppo.reward.scale=2.0 trainer.precision=bf16 "
    "trainer.ppo.initial_policy_kl_penalty=0.5 trainer.ppo.gae_lambda=0.5 data.chat=True "
    "reward.kwargs.pattern=x data.system_prompt=Count. data.train.arguments.high=9 "
    "model.peft.peft_scheme=lora"
)


def changed_keys(message):
    """The keys that a refusal lists for ``resume_changed``."""
    return re.search(r"exp_manager\.resume_changed=\[([^]]*)\]", message)[1].split(",")


@pytest.mark.parametrize("knows_identity", [True, False], ids=["new state", "old state"])
def test_what_defines_the_objective_changes_on_purpose_alone(configured, knows_identity):
    begun(configured("ppo"), knows_identity=knows_identity)
    message = refused(configured("ppo", **CHANGED))
    assert "explicit_log_dir to another directory" in message
    for key, value in CHANGED.items():
        assert re.search(rf"\b{re.escape(key)}: [^,]* -> {re.escape(str(value))}", message), key
    names = changed_keys(message)
    assert sorted(names) == sorted(CHANGED)
    for accepted in (names, {key.rpartition(".")[0] for key in CHANGED}):
        assert prepared(configured("ppo", **CHANGED, exp_manager__resume_changed=[*accepted])) == []


FREE = pairs(
    "trainer.ppo.max_steps=7 trainer.ppo.max_epochs=3 trainer.ppo.save_interval=1 "
    "model.global_batch_size=32 model.ppo.num_rollout_samples=128 "
    "model.ppo.rollout_micro_batch_size=16 model.optim.lr=0.00001 "
    "model.optim.sched.max_steps=100 model.sequence_packing.enabled=true trainer.devices=2 "
    "exp_manager.save_last_k=5 exp_manager.create_tensorboard_logger=false "
    "reward.time_limit_s=5.0 cluster.timeout_s=60.0"
)


def test_sizes_saving_layout_and_waits_may_change(configured):
    folder = begun(configured("ppo"))
    before = snapshot(folder)
    assert prepared(configured("ppo")) == []
    assert prepared(configured("ppo", **FREE)) == []
    assert snapshot(folder) == before


def test_a_changed_reward_is_seen_and_a_moved_one_is_the_same(configured, tmp_path, monkeypatch):
    text = "def reward(prompts, responses, ground_truths):\n    return [1.0] * len(prompts)\n"
    first, moved = tmp_path / "my_own_rewards.py", tmp_path / "elsewhere.py"
    first.write_text(text)
    moved.write_text(text)

    def scored_by(path, **more):
        return configured("ppo", reward__function=f"{path}:reward", reward__kwargs={}, **more)

    begun(scored_by(first))
    assert prepared(scored_by(first)) == []
    assert prepared(scored_by(moved)) == []
    first.write_text(text.replace("1.0", "0.0"))
    refused(scored_by(first), r"reward\.function was .*my_own_rewards\.py.* different content")
    assert prepared(scored_by(first, exp_manager__resume_changed=["reward.function"])) == []
    # A module of the user's.
    monkeypatch.syspath_prepend(tmp_path)
    first.write_text(text)
    config = scored_by("my_own_rewards", exp_manager__explicit_log_dir=str(tmp_path / "other"))
    begun(config)
    assert prepared(config) == []
    first.write_text(text.replace("1.0", "0.0"))
    refused(config, r"reward\.function was my_own_rewards:reward")


GAME = {"kind": "messages", "factory": "aligner.examples.tasks.games:GuessingGame"}


def test_an_environment_s_settings_change_on_purpose_alone(configured):
    def played(changes, **more):
        environment = {**recipe("ppo")["environment"], **GAME, **changes}
        reward = {**recipe("ppo")["reward"], "kind": "environment", "function": None, "kwargs": {}}
        return configured("ppo", environment=environment, reward=reward, **more)

    begun(played({}))
    assert prepared(played({})) == []
    changes = {"kwargs": {"guesses": 2}, "unscored": "mask", "failed": "zero", "max_turns": 3}
    names = changed_keys(refused(played(changes)))
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
def test_templates_are_told_the_time_of_the_first_start(configured, tmp_path):
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
