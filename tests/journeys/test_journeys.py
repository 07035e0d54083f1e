"""First tries of people who come from other libraries, with an installed wheel: data.

Each journey has data and functions in the form of the other library, no recipe, and one command or
script, as the page in question says.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from first_tries import LENGTHS, SAMPLING, SMALL, losses, metrics, python_run, write

pytestmark = pytest.mark.extended

TURNS = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]


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
    aligner(f"train-{algorithm}", *SMALL, f"data.train.source={name}", *steps)
    losses = [line["train_optim/loss"] for line in metrics(tmp_path) if "train_optim/loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] * 0.9


def test_a_hugging_face_directory_is_trained_and_converted_back(aligner, tmp_path):
    aligner("convert", "--input", "tiny.nemo", "--output", "hf")
    write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}] * 32)
    settings = [SMALL[0].replace("tiny.nemo", "hf"), SMALL[1], "data.train.source=rows.jsonl"]
    sizes = ["trainer.sft.max_steps=2", "model.global_batch_size=16"]
    aligner("train-sft", *settings, *sizes)
    aligner("convert", "--input", "runs/first/policy.nemo", "--output", "trained")
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.restore_from_path=other.nemo", "'other.nemo' does not exist"),
        ("data.train.source=other.jsonl", "other.jsonl does not exist"),
        ("+validation.sets.hard.source=other.jsonl", "other.jsonl does not exist"),
        ("reward.function=rewards.py:bad", "must take (prompts, responses"),
        ("reward.function=rewards:bad", "must take (prompts, responses"),
        ("reward.function=package.rewards:reward", "no module named 'package'"),
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
    done = aligner("train-ppo", *arguments.values(), code=2)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert message in done.stderr
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 3.0  # of the processor
    assert sorted(os.listdir(tmp_path)) == before


def test_the_start_of_a_run_shows_signs_of_life(tmp_path, tiny_nemo, installed, aligner):
    write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}] * 16)
    sizes = ["data.train.source=rows.jsonl", "model.global_batch_size=16"]
    aligner("help")  # compiles the modules of a new installation
    command = [sys.executable, "-m", "aligner.commands", "train-sft", *SMALL, *sizes]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline()]
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        lines += process.stdout.readlines()
    assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 2.0  # seconds of the processor
    stages = [line.partition(":")[2].split()[0] for line in lines if line.startswith("starting:")]
    assert stages == ["importing", "reading", "building"]
    assert lines[0].startswith("starting: importing")
    assert "step 1/1" in "".join(lines)


SUMS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(12)]


def test_a_killed_run_of_weighted_sources_continues_exactly(aligner, tmp_path, installed):
    write(tmp_path / "a.jsonl", SUMS)
    write(tmp_path / "b.json", [{**row, "prompt": f"b{row['prompt']}"} for row in SUMS[:5]])
    sizes = ["model.global_batch_size=4", "model.optim.lr=1e-2", "data.weights=[3,1]"]
    sizes += [
        "trainer.sft.max_steps=60",
        "trainer.sft.max_epochs=60",
        "trainer.sft.save_interval=1",
    ]
    arguments = ["train-sft", SMALL[0], "data.train.source=[a.jsonl,b.json]", *sizes]
    command = [sys.executable, "-m", "aligner.commands", *arguments]
    killed = "exp_manager.explicit_log_dir=runs/first"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.Popen(
        [*command, killed], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    path = tmp_path / "runs" / "first" / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < 8:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    stopped = metrics(tmp_path)[-1]["step"]
    assert stopped < 60
    aligner(*arguments, killed)
    resumed = losses(metrics(tmp_path))
    aligner(*arguments, "exp_manager.explicit_log_dir=runs/second")
    (tmp_path / "runs" / "first").rename(tmp_path / "runs" / "killed")
    (tmp_path / "runs" / "second").rename(tmp_path / "runs" / "first")
    assert losses(metrics(tmp_path)) == resumed
    assert len(resumed) == 60


def test_pairs_are_learned_by_kto(aligner, tmp_path):
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "x"} for i in range(32)]
    write(tmp_path / "pairs.json", pairs)
    sizes = ["trainer.dpo.max_steps=4", "model.global_batch_size=16", "model.optim.lr=1e-3"]
    source = ["data.train.source=pairs.json", "trainer.dpo.loss=kto", "trainer.dpo.max_epochs=4"]
    done = aligner("train-dpo", *SMALL, *source, *sizes)
    assert "each response of a pair is a labelled response" in " ".join(done.stdout.split())
    first, *_, last = losses(metrics(tmp_path)).values()
    assert last < first


REWARD_SCORES = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo

ours = load_from_nemo(MegatronGPTRewardModel, restore_path="runs/first/reward_model.nemo")
model = AutoModelForSequenceClassification.from_pretrained("reward_hf").eval()
tokenizer = AutoTokenizer.from_pretrained("reward_hf")
for text in ("1+1=2", "1+1=x", "7+1= 9 or so"):
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
    with torch.no_grad():
        theirs = model(ids).logits
    batch = {"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])}
    print(theirs.shape == (1, 1), theirs.item(), ours.infer(batch).item())
"""


def test_a_reward_model_is_a_sequence_classifier_of_transformers(aligner, tmp_path, installed):
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "xyz"} for i in range(64)]
    write(tmp_path / "pairs.jsonl", pairs)
    loop = [f"trainer.reward_model.max_{name}=12" for name in ("steps", "epochs")]
    sizes = ["model.global_batch_size=32", "model.optim.lr=1e-3", *loop]
    aligner("train-reward", *SMALL, "data.train.source=pairs.jsonl", *sizes)
    aligner("convert", "--input", "runs/first/reward_model.nemo", "--output", "reward_hf")
    done = python_run([sys.executable, "-c", REWARD_SCORES], tmp_path, installed)
    assert "UNEXPECTED" not in done.stderr
    assert "MISSING" not in done.stderr
    scores = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [shape for shape, *_ in scores] == ["True"] * 3, done.stderr
    assert len({score for _, score, _ in scores}) == 3
    for _, theirs, ours in scores:
        assert float(theirs) == pytest.approx(float(ours), abs=1e-5)
    # The directory is a reward model and the beginning of a critic.
    (tmp_path / "runs" / "first").rename(tmp_path / "runs" / "reward")
    write(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1="} for i in range(16)])
    model = ["reward=model", "reward.model.restore_from_path=reward_hf"]
    model.append("critic.restore_from_path=reward_hf")
    rows = ["data.train.source=rows.jsonl", "data.ground_truth_column=null"]
    aligner("train-ppo", *SMALL, *LENGTHS, *model, *rows)
