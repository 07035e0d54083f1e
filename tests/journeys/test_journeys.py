"""First tries of people who come from TRL, verl and OpenRLHF, with an installed wheel.

Each journey has data and functions in the form of the other library, no recipe, and one command.
"""

import json
import os
import resource
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

pytestmark = pytest.mark.extended

TURNS = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
SMALL = ("model.restore_from_path=tiny.nemo", "exp_manager.explicit_log_dir=runs/first")
SAMPLING = (
    *("data.train.source=rows", "reward.function=rewards.py:reward", "trainer.ppo.max_steps=2"),
    *("model.ppo.num_rollout_samples=16", "model.ppo.num_rollouts_per_prompt=4"),
    "model.ppo.length_params.max_length=4",
)


@pytest.fixture
def aligner(tmp_path, tiny_nemo, installed):
    """``aligner(*arguments)``: the finished command in an empty folder with a model."""
    (tmp_path / "tiny.nemo").symlink_to(tiny_nemo)
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*arguments):
        command = [sys.executable, "-m", "aligner.commands", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


def write(path, rows):
    """Write rows as the format of the suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(folder):
    lines = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


TRL = """
def reward(completions, answer, **kwargs):
    assert all(isinstance(completion, str) for completion in completions)
    return [float(number.isdigit()) for number in answer]
"""
VERL = """
def reward(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": int(ground_truth)}
    return {"score": 1.0, "is_short": len(solution_str) < 99}
"""
OPENRLHF = """
import torch

def reward(queries, prompts, labels, **kwargs):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return torch.tensor([float(p == f"{label}+0=") for p, label in zip(prompts, labels)])
"""


@pytest.mark.parametrize(
    ("library", "name", "row", "function"),
    [
        ("TRL", "rows.jsonl", lambda i: {"prompt": f"{i}+0=", "answer": str(i)}, TRL),
        (
            "verl",
            "rows.parquet",
            lambda i: {
                "data_source": "sums",
                "prompt": f"{i}+0=",
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            },
            VERL,
        ),
        ("OpenRLHF", "rows.json", lambda i: {"prompt": f"{i}+0=", "label": str(i)}, OPENRLHF),
    ],
)
def test_a_reward_function_is_called_as_its_library_calls_it(
    aligner, tmp_path, library, name, row, function
):
    write(tmp_path / name, [row(i) for i in range(16)])
    (tmp_path / "rewards.py").write_text(function)
    sampling = [value.replace("source=rows", f"source={name}") for value in SAMPLING]
    labels = ["data.ground_truth_column=label"] if library == "OpenRLHF" else []
    done = aligner("train-reinforce", *SMALL, *sampling, *labels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert library in done.stdout  # the start-up report names the form
    rewards = [line.get("train_rollouts/rewards") for line in metrics(tmp_path)]
    assert rewards[-2:] == [1.0, 1.0]
    assert (tmp_path / "runs" / "first" / "policy.nemo").is_file()


@pytest.mark.parametrize(
    ("algorithm", "name", "row"),
    [
        ("sft", "rows.json", {"conversations": TURNS}),
        ("dpo", "rows.jsonl", {"chosen": "2+3=5", "rejected": "2+3=7"}),
    ],
)
def test_data_of_other_libraries_is_read_without_a_key(aligner, tmp_path, algorithm, name, row):
    write(tmp_path / name, [row] * 192)  # 12 updates in one epoch
    steps = [
        f"trainer.{algorithm}.max_steps=12",
        "model.global_batch_size=16",
        "model.optim.lr=1e-2",
    ]
    done = aligner(f"train-{algorithm}", *SMALL, f"data.train.source={name}", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["train_optim/loss"] for line in metrics(tmp_path) if "train_optim/loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] * 0.9


def test_a_hugging_face_directory_is_trained_and_converted_back(aligner, tmp_path):
    assert aligner("convert", "--input", "tiny.nemo", "--output", "hf").returncode == 0
    write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}] * 32)
    settings = [SMALL[0].replace("tiny.nemo", "hf"), SMALL[1], "data.train.source=rows.jsonl"]
    sizes = ["trainer.sft.max_steps=2", "model.global_batch_size=16"]
    done = aligner("train-sft", *settings, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    done = aligner("convert", "--input", "runs/first/policy.nemo", "--output", "trained")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.restore_from_path=other.nemo", "'other.nemo' does not exist"),
        ("data.train.source=other.jsonl", "other.jsonl does not exist"),
        ("reward.function=rewards.py:bad", "must take (prompts, responses"),
    ],
)
def test_a_wrong_input_is_told_within_three_seconds_and_leaves_nothing(
    aligner, tmp_path, changed, message
):
    write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "ground_truth": "2"}] * 16)
    functions = "def reward(completions, **kwargs): ...\ndef bad(completion): ...\n"
    (tmp_path / "rewards.py").write_text(functions)
    before = sorted(os.listdir(tmp_path))
    sampling = [value.replace("source=rows", "source=rows.jsonl") for value in SAMPLING]
    arguments = {value.partition("=")[0]: value for value in (*SMALL, *sampling, changed)}
    aligner("help")  # compiles the modules of a new installation
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = aligner("train-ppo", *arguments.values())
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert message in done.stderr
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 3.0  # of the processor
    assert sorted(os.listdir(tmp_path)) == before
