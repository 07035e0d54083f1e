"""What a user gets wrong is refused with the key or file, the value, and a remedy."""

import json
from types import SimpleNamespace

import pytest
from settings import tree

from aligner.config import parse_config
from aligner.errors import (
    AlignerError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    RewardError,
    RewardTimeoutError,
    StorageError,
)

REWARDS = """
import time

def good(prompts, responses, ground_truths):
    return [0.0] * len(prompts)

def raises(prompts, responses, ground_truths):
    raise KeyError("no such answer")

def too_few(prompts, responses, ground_truths):
    return [1.0]

def not_a_number(prompts, responses, ground_truths):
    return [float("nan")] * len(prompts)

def hangs(prompts, responses, ground_truths):
    time.sleep(600)

def wants_column(prompts, responses, ground_truths, difficulty):
    return [0.0] * len(prompts)
"""


# Files beside them, by name.
FILES = {
    "rewards.py": REWARDS,
    "train.jsonl": "".join(
        f'{{"prompt": "{i}+1=", "ground_truth": "{i + 1}"}}\n' for i in range(4)
    ),
    "foreign.nemo": "not an archive",
    "long.jsonl": json.dumps({"prompt": "1" * 300, "ground_truth": "1"}),
    "longer.jsonl": json.dumps({"prompt": "1" * 60, "ground_truth": "1"}),
    "empty.jsonl": "",
    "file": "",
}


PATH, FOLDER = "model.restore_from_path", "exp_manager.explicit_log_dir"
# A run of one step of the tiny model.
SETTINGS = {
    **{f"{role}.micro_batch_size": 4 for role in ("model", "critic")},
    **{f"{role}.global_batch_size": 4 for role in ("model", "critic")},
    "model.ppo.num_rollout_samples": 4,
    "model.ppo.length_params.max_length": 2,
    "reward.function": "FOLDER/rewards.py:good",
    "data.train.source": "FOLDER/train.jsonl",
    FOLDER: "FOLDER/run",
    "exp_manager.create_tensorboard_logger": False,
    "trainer.ppo.initial_policy_kl_penalty": 0.0,
    "trainer.ppo.max_steps": 1,
}


@pytest.fixture
def run(tmp_path, tiny_nemo):
    """``run.start(overrides)`` trains one step; "FOLDER" in a value is ``run.folder``."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def start(overrides):
        from aligner.algorithms.ppo.trainer import train_ppo

        settings = {
            key: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
            for key, value in (SETTINGS | {PATH: str(tiny_nemo)} | overrides).items()
        }
        train_ppo(parse_config(tree(settings)))

    return SimpleNamespace(start=start, folder=tmp_path)


def refused(run, error, words, overrides):
    with pytest.raises(error) as caught:
        run.start(overrides)
    assert isinstance(caught.value, AlignerError)
    for word in words:
        assert word.replace("FOLDER", str(run.folder)) in str(caught.value)


def test_the_settings_are_good_otherwise(run):
    run.start({})
    assert (run.folder / "run" / "policy.nemo").exists()
    assert (run.folder / "run" / "report.html").exists()


PACKED = {
    "model.sequence_packing.enabled": True,
    "model.sequence_packing.train_mb_tokens": 32,
    "data.train.source": "FOLDER/longer.jsonl",
}
HANGS = {
    "reward.function": "FOLDER/rewards.py:hangs",
    "reward.time_limit_s": 3.0,
    "reward.timeout_reward": None,
}


def reward(name):
    return {"reward.function": f"FOLDER/rewards.py:{name}"}


def data(name):
    return {"data.train.source": f"FOLDER/{name}.jsonl"}


# Error, words of its message, overrides.
CASES = {
    "missing checkpoint": (CheckpointNotFoundError, ["gone.nemo", PATH], {PATH: "gone.nemo"}),
    "foreign checkpoint": (CheckpointError, ["foreign.nemo"], {PATH: "FOLDER/foreign.nemo"}),
    "prompt longer than the model": (
        *(ConfigError, ["300 tokens", "256 positions", "data.max_prompt_length=254"]),
        data("long"),
    ),
    "prompt longer than a token budget": (
        *(ConfigError, ["sequence_packing.train_mb_tokens=32", "60 tokens", "at least 62"]),
        PACKED,
    ),
    "response longer than the model": (
        *(ConfigError, ["Lower max_length below 256"]),
        {"model.ppo.length_params.max_length": 256},
    ),
    "missing data column": (
        *(DataError, ["train.jsonl, line 1", "'answer' is missing", "ground_truth", "prompt"]),
        {"data.ground_truth_column": "answer"},
    ),
    "empty data": (DataError, ["empty.jsonl", "no rows"], data("empty")),
    "missing reward function": (
        *(ConfigError, ["reward.function", "'best'", "good"]),
        reward("best"),
    ),
    "reward function that needs a missing column": (
        *(DataError, ["difficulty", "columns found"]),
        reward("wants_column"),
    ),
    "reward function that raises": (
        *(RewardError, ["KeyError", "no such answer", "the batch as a whole"]),
        reward("raises"),
    ),
    "too few rewards": (RewardError, ["1 rewards for 4 samples"], reward("too_few")),
    "reward that is no number": (RewardError, ["nan", "sample 0"], reward("not_a_number")),
    "reward function that hangs": (RewardTimeoutError, ["hangs", "reward.time_limit_s"], HANGS),
    "file as directory": (StorageError, ["FOLDER/file"], {FOLDER: "FOLDER/file/run"}),
    "directory that not even root may write": (
        *(StorageError, ["/proc/run"]),
        {FOLDER: "/proc/run"},
    ),
    "unknown monitor": (
        *(ConfigError, ["val_rollouts/acuracy", "val_rollouts/accuracy"]),
        {"exp_manager.monitor": "val_rollouts/acuracy"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_refused(run, case):
    refused(run, *CASES[case])


def test_disk_full_while_saving_names_the_place_and_keeps_earlier_states(run, monkeypatch):
    run.start({"trainer.ppo.save_interval": 1})

    def full(folder, needed):
        raise StorageError(f"{folder}: {needed} bytes are needed and 0 are free; make room")

    monkeypatch.setattr("aligner.checkpoint.run_state.store.require_free_space", full)
    more = {"trainer.ppo.max_steps": 2, "trainer.ppo.max_epochs": 2}
    refused(run, StorageError, ["run_state", "make room"], more)
    assert [p.name for p in (run.folder / "run" / "run_state").glob("step_*")] == ["step_000001"]
