"""What a command finds in its directory: its own run, or a refusal, and nothing is ever lost."""

import copy
import json
import os
import shutil
from contextlib import ExitStack
from functools import cache, reduce
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from newest_state import newest
from omegaconf import OmegaConf

from aligner.algorithms.run.directory import RunDirectory
from aligner.algorithms.run.identity import RunIdentity, file_fingerprint
from aligner.algorithms.run.run import prepare_log_dir
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import DPORunConfig, RSRunConfig, RunConfig, SFTRunConfig
from aligner.config.load import parse_config
from aligner.errors import CheckpointError, ConfigError

CONF = Path(__file__).parents[3] / "conf"
ROOTS = {"dpo": DPORunConfig, "kto": DPORunConfig, "sft": SFTRunConfig, "rs": RSRunConfig}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_nemo):
    path = tmp_path_factory.mktemp("models") / "a.nemo"
    shutil.copy(tiny_nemo, path)
    return path


@pytest.fixture
def configured(tmp_path, model):
    """``configured(kind, **changes)``: the configuration of a tiny recipe in one directory."""

    def configuration(kind, **changes):
        changes = {
            "model__restore_from_path": str(model),
            "exp_manager__explicit_log_dir": str(tmp_path / "run"),
            **changes,
        }
        values = copy.deepcopy(recipe(kind))
        for key, value in changes.items():
            *path, name = key.split("__")
            reduce(dict.__getitem__, path, values)[name] = value
        return parse_config(values, ROOTS.get(kind, RunConfig))

    return configuration


@cache
def recipe(kind):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(f"recipes/{kind}_tiny_cpu"), resolve=True)


def prepared(config) -> list[str]:
    folder = Path(config.exp_manager.explicit_log_dir)
    directory = RunDirectory(folder, RunStateStore(folder / "run_state"))
    return directory.prepare(RunIdentity.of(config), config)


def begun(config, *, saved=(2, 4), steps=5, knows_identity=True) -> Path:
    """What such a run leaves that was killed; ``saved``: the steps of its run states."""
    folder = Path(config.exp_manager.explicit_log_dir)
    prepared(config)
    store = RunStateStore(folder / "run_state", save_last_k=2)
    identity = {"identity": RunIdentity.of(config).as_dict()} if knows_identity else {}
    for step in saved:
        store.save(step, {"config": config.as_dict(), "learner": {}, **identity})
        RunDirectory(folder, store).mark_saved()
    lines = [json.dumps({"step": step}) + "\n" for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("knows_identity", [True, False], ids=["new state", "old state"])
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("ppo", "grpo", "PPO and this command's is GRPO"),
        ("rloo", "sft", "RLOO and this command's is Fine-tuning"),
        ("dpo", "kto", "(DPO) and this command's is Preference optimisation (KTO)"),
    ],
)
def test_another_algorithm_is_refused(configured, first, second, words, knows_identity):
    folder = begun(configured(first), knows_identity=knows_identity)
    before = files_of(folder)
    with pytest.raises(ConfigError) as caught:
        prepared(configured(second))
    message = str(caught.value)
    for part in (words, "step_000004", "explicit_log_dir", "start_anew=true", "earlier_001"):
        assert part in message
    assert files_of(folder) == before


def test_an_estimator_may_be_changed_on_purpose_and_a_critic_may_not(configured):
    accepted = {"exp_manager__accept_changed": ["algorithm"]}
    begun(configured("grpo"))
    with pytest.raises(ConfigError, match=r"accept_changed=\[algorithm\]"):
        prepared(configured("rloo"))
    assert prepared(configured("rloo", **accepted)) == []
    with pytest.raises(ConfigError, match="GRPO and this command's is PPO") as caught:
        prepared(configured("ppo", **accepted))
    assert "accept_changed" not in str(caught.value)


def test_a_model_may_be_moved_and_another_one_is_refused(configured, model, tmp_path):
    begun(configured("ppo"))
    moved, other = tmp_path / "moved.nemo", tmp_path / "other.nemo"
    content = bytearray(model.read_bytes())
    moved.write_bytes(content)
    content[len(content) // 2] ^= 1
    other.write_bytes(content)
    key = "model__restore_from_path"
    assert prepared(configured("ppo", **{key: str(moved)})) == []
    with pytest.raises(ConfigError, match=r"other\.nemo has another content.*changed=\[model\]"):
        prepared(configured("ppo", **{key: str(other)}))
    accepted = {"exp_manager__accept_changed": ["model"]}
    assert prepared(configured("ppo", **{key: str(other)}, **accepted)) == []


def test_data_may_be_moved_and_other_data_are_refused(configured, tmp_path):
    train, moved, other = (tmp_path / f"{name}.jsonl" for name in ("train", "moved", "other"))
    rows = [json.dumps({"prompt": f"{n}+1=", "ground_truth": "1"}) + "\n" for n in range(4)]
    for path in (train, moved):
        path.write_text("".join(rows))
    other.write_text("".join(rows[::-1]))  # as many

    def taking(path, **more):
        source = {"source": str(path), "arguments": {}}
        return configured("ppo", data__train=source, **more)

    begun(taking(train))
    assert prepared(taking(moved)) == []
    with pytest.raises(ConfigError, match=r"train\.jsonl and data\.train\.source=.*other\.jsonl"):
        prepared(taking(other))
    assert prepared(taking(other, exp_manager__accept_changed=["data"])) == []
    with pytest.raises(ConfigError, match=r"accept_changed=\[data\]"):
        prepared(configured("ppo"))  # a generator


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
    before = files_of(folder)
    with pytest.raises(CheckpointError) as caught:
        prepared(configured("ppo"))
    for part in (*words, "start_anew=true", "explicit_log_dir"):
        assert part in str(caught.value)
    assert files_of(folder) == before
    (note,) = prepared(configured("ppo", exp_manager__start_anew=True))
    assert str(folder / "earlier_001") in note
    assert files_of(folder / "earlier_001") == before
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
    with pytest.raises(CheckpointError, match="no run state to continue from"):
        prepared(configured("ppo"))
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
    before = files_of(folder)
    said = r"resume_if_exists=false, but .* contains a run.*start_anew"
    with pytest.raises(ConfigError, match=said):
        prepared(configured("ppo", exp_manager__resume_if_exists=False))
    assert files_of(folder) == before


def test_a_damaged_state_leaves_the_question_to_the_one_before(configured):
    folder = begun(configured("ppo"))
    path = folder / "run_state" / "step_000004" / "state.json"
    path.write_bytes(b"x" * path.stat().st_size)
    assert prepared(configured("ppo")) == []
    with pytest.raises(ConfigError, match="step_000002"):
        prepared(configured("grpo"))


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
