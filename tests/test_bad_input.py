"""What a user gets wrong is refused with the key or file, the value, and a remedy.

Refusals of single rows and of scores are in tests/unit/data and tests/unit/rewards.
"""

import json

import pytest
from settings import tree

from aligner.algorithms.ppo.trainer import train_ppo
from aligner.algorithms.run.inputs import check_inputs
from aligner.config import parse_config
from aligner.errors import AlignerError, ConfigError, DataError, RewardTimeoutError, StorageError

FILES = {
    "rewards.py": """
import time

def good(prompts, responses, ground_truths):
    return [0.0] * len(prompts)

def hangs(prompts, responses, ground_truths):
    time.sleep(600)

def one_list(responses):
    return [0.0]
""",
    "train.jsonl": '{"prompt": "1+1=", "ground_truth": "2"}\n' * 4,
    "long.jsonl": json.dumps({"prompt": "1" * 300, "ground_truth": "1"}),
    "longer.jsonl": json.dumps({"prompt": "1" * 60, "ground_truth": "1"}),
}
FOLDER, SOURCE = "exp_manager.explicit_log_dir", "data.train.source"
# A run of one step of the tiny model.
SETTINGS = {
    **{f"{role}.micro_batch_size": 4 for role in ("model", "critic")},
    **{f"{role}.global_batch_size": 4 for role in ("model", "critic")},
    "model.ppo.num_rollout_samples": 4,
    "model.ppo.length_params.max_length": 2,
    "reward.function": "rewards.py:good",
    SOURCE: "train.jsonl",
    FOLDER: "run",
    "exp_manager.create_tensorboard_logger": False,
    "trainer.ppo.initial_policy_kl_penalty": 0.0,
    "trainer.ppo.max_steps": 1,
}


@pytest.fixture
def configured(tmp_path, tiny_nemo, monkeypatch):
    """The configuration of the run, with overrides, beside the files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    settings = {**SETTINGS, "model.restore_from_path": str(tiny_nemo)}
    return lambda overrides: parse_config(tree(settings | overrides))


PACKING = "model.sequence_packing"
# Error, words of its message, overrides.
CASES = {
    "prompt longer than the model": (
        *(ConfigError, ["300 tokens", "256 positions", "data.max_prompt_length=254"]),
        {SOURCE: "long.jsonl"},
    ),
    "prompt longer than a token budget": (
        *(ConfigError, ["sequence_packing.train_mb_tokens=32", "60 tokens", "at least 62"]),
        {SOURCE: "longer.jsonl", f"{PACKING}.enabled": True, f"{PACKING}.train_mb_tokens": 32},
    ),
    "response longer than the model": (
        *(ConfigError, ["Lower max_length below 256"]),
        {"model.ppo.length_params.max_length": 256},
    ),
    "reward function that hangs": (
        *(RewardTimeoutError, ["hangs", "reward.time_limit_s"]),
        {
            "reward.function": "rewards.py:hangs",
            "reward.time_limit_s": 3.0,
            "reward.timeout_reward": None,
        },
    ),
    "directory that not even root may write": (
        *(StorageError, ["/proc/run"]),
        {FOLDER: "/proc/run"},
    ),
    "unknown monitor": (
        *(ConfigError, ["val_rollouts/acuracy", "val_rollouts/accuracy"]),
        {"exp_manager.monitor": "val_rollouts/acuracy"},
    ),
}


def refused(error, words, function):
    with pytest.raises(error) as caught:
        function()
    assert isinstance(caught.value, AlignerError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_refused(configured, case):
    error, words, overrides = CASES[case]
    refused(error, words, lambda: train_ppo(configured(overrides)))


@pytest.mark.parametrize(
    ("error", "words", "key", "value"),
    [
        (DataError, "no.jsonl does not exist", "validation.sets.hard.source", "no.jsonl"),
        (ConfigError, "must take (prompts, responses", "reward.function", "rewards:one_list"),
        (ConfigError, "no module named 'package'", "reward.function", "package.rewards:reward"),
    ],
)
def test_sets_of_validation_and_modules_are_looked_for_first(configured, error, words, key, value):
    refused(error, [words], lambda: check_inputs(configured({key: value})))


def test_the_settings_are_good_and_a_full_disk_keeps_the_states_of_before(
    configured, monkeypatch, tmp_path
):
    train_ppo(configured({"trainer.ppo.save_interval": 1}))
    assert {"policy.nemo", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}

    def full(folder, needed):
        raise StorageError(f"{folder}: {needed} bytes are needed and 0 are free; make room")

    monkeypatch.setattr("aligner.checkpoint.run_state.store.require_free_space", full)
    more = {"trainer.ppo.max_steps": 2, "trainer.ppo.max_epochs": 2}
    refused(StorageError, ["run_state", "make room"], lambda: train_ppo(configured(more)))
    assert [path.name for path in (tmp_path / "run/run_state").glob("step_*")] == ["step_000001"]
