"""What a user gets wrong is refused with the key or file, the value, and a remedy."""

import json
from types import SimpleNamespace

import pytest

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


@pytest.fixture
def run(tmp_path, tiny_nemo):
    """``run(dotted__key=value, ...)`` trains one step of the tiny model with these settings."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    def start(**overrides):
        from aligner.algorithms.ppo.trainer import train_ppo

        settings = {
            "model__restore_from_path": str(tiny_nemo),
            "model__micro_batch_size": 4,
            "model__global_batch_size": 4,
            "model__ppo__num_rollout_samples": 4,
            "model__ppo__length_params__max_length": 2,
            "critic__micro_batch_size": 4,
            "critic__global_batch_size": 4,
            "reward__function": f"{tmp_path}/rewards.py:good",
            "data__train__source": str(tmp_path / "train.jsonl"),
            "exp_manager__explicit_log_dir": str(tmp_path / "run"),
            "exp_manager__create_tensorboard_logger": False,
            "trainer__ppo__initial_policy_kl_penalty": 0.0,
            "trainer__ppo__max_steps": 1,
            **overrides,
        }
        values = {}
        for key, value in settings.items():
            *path, last = key.split("__")
            level = values
            for name in path:
                level = level.setdefault(name, {})
            level[last] = value
        train_ppo(parse_config(values))

    return SimpleNamespace(start=start, folder=tmp_path)


def refused(run, error, words, **overrides):
    with pytest.raises(error) as caught:
        run.start(**overrides)
    assert isinstance(caught.value, AlignerError)
    for word in words:
        assert word in str(caught.value)


def test_the_settings_are_good_otherwise(run):
    run.start()
    assert (run.folder / "run" / "policy.nemo").exists()
    assert (run.folder / "run" / "report.html").exists()


def test_missing_checkpoint(run):
    refused(
        run,
        CheckpointNotFoundError,
        ["gone.nemo", "model.restore_from_path"],
        model__restore_from_path="gone.nemo",
    )


def test_foreign_checkpoint(run):
    path = run.folder / "foreign.nemo"
    path.write_text("not an archive")
    refused(run, CheckpointError, ["foreign.nemo"], model__restore_from_path=str(path))


def test_prompt_longer_than_the_model(run):
    path = run.folder / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 300, "ground_truth": "1"}))
    refused(
        run,
        ConfigError,
        ["300 tokens", "256 positions", "data.max_prompt_length=254"],
        data__train__source=str(path),
    )


def test_prompt_longer_than_a_token_budget(run):
    path = run.folder / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 60, "ground_truth": "1"}))
    refused(
        run,
        ConfigError,
        ["model.sequence_packing.train_mb_tokens=32", "60 tokens", "at least 62"],
        data__train__source=str(path),
        model__sequence_packing__enabled=True,
        model__sequence_packing__train_mb_tokens=32,
    )


def test_response_longer_than_the_model(run):
    refused(
        run, ConfigError, ["Lower max_length below 256"], model__ppo__length_params__max_length=256
    )


def test_missing_data_column(run):
    refused(
        run,
        DataError,
        ["train.jsonl, line 1", "'answer' is missing", "ground_truth", "prompt"],
        data__ground_truth_column="answer",
    )


def test_empty_data(run):
    path = run.folder / "empty.jsonl"
    path.touch()
    refused(run, DataError, ["empty.jsonl", "no rows"], data__train__source=str(path))


def test_missing_reward_function(run):
    refused(
        run,
        ConfigError,
        ["reward.function", "'best'", "good"],
        reward__function=f"{run.folder}/rewards.py:best",
    )


def test_reward_function_that_needs_a_missing_column(run):
    refused(
        run,
        DataError,
        ["difficulty", "columns found"],
        reward__function=f"{run.folder}/rewards.py:wants_column",
    )


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("raises", RewardError, ["KeyError", "no such answer", "the batch as a whole"]),
        ("too_few", RewardError, ["1 rewards for 4 samples"]),
        ("not_a_number", RewardError, ["nan", "sample 0"]),
    ],
)
def test_bad_reward_functions(run, function, error, words):
    refused(run, error, words, reward__function=f"{run.folder}/rewards.py:{function}")


def test_a_reward_function_that_hangs(run):
    refused(
        run,
        RewardTimeoutError,
        ["hangs", "reward.time_limit_s"],
        reward__function=f"{run.folder}/rewards.py:hangs",
        reward__time_limit_s=3.0,
        reward__timeout_reward=None,
    )


def test_directory_that_cannot_be_made(run):
    (run.folder / "file").touch()
    refused(
        run,
        StorageError,
        [str(run.folder / "file")],
        exp_manager__explicit_log_dir=str(run.folder / "file" / "run"),
    )


def test_directory_that_cannot_be_written(run):
    """Nobody may write there, not even root."""
    refused(run, StorageError, ["/proc/run"], exp_manager__explicit_log_dir="/proc/run")


def test_disk_full_while_saving_names_the_place_and_keeps_earlier_states(run, monkeypatch):
    run.start(trainer__ppo__save_interval=1)

    def full(folder, needed):
        raise StorageError(f"{folder}: {needed} bytes are needed and 0 are free; make room")

    monkeypatch.setattr("aligner.checkpoint.run_state.store.require_free_space", full)
    refused(
        run,
        StorageError,
        ["run_state", "make room"],
        trainer__ppo__max_steps=2,
        trainer__ppo__max_epochs=2,
    )
    assert [p.name for p in (run.folder / "run" / "run_state").glob("step_*")] == ["step_000001"]


def test_unknown_monitor(run):
    refused(
        run,
        ConfigError,
        ["val_rollouts/acuracy", "val_rollouts/accuracy"],
        exp_manager__monitor="val_rollouts/acuracy",
    )
