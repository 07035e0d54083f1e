"""First tries of people who come from other libraries, with an installed wheel: data.

Each journey has data and functions in the form of the other library, no recipe, and one command or
script, as the page in question says.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_tries import LENGTHS, SMALL, losses, metrics, python_run, write

pytestmark = pytest.mark.extended


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
