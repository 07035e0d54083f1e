"""Training functions on a directory of a model that only transformers builds."""

import os
import sys
from pathlib import Path

import pytest

import aligner
from aligner.checkpoint.hf.any_model import read_any
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_transformers import tiny_model

pytestmark = [pytest.mark.extended, pytest.mark.integration]

ANSWERS = [{"prompt": f"{i} + 2 = ", "response": str(i + 2)} for i in range(32)]
PAIRS = [{"prompt": f"{i} + 2 = ", "chosen": str(i + 2), "rejected": "x"} for i in range(32)]


def test_fine_tuned_aligned_rated_and_distilled(tmp_path):
    tokenizer, folder = byte_level_tokenizer(), tmp_path / "mamba2"
    tiny_model("mamba2", vocab_size=tokenizer.vocab_size).save_pretrained(folder)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    common = {"lr": 3e-3, "max_steps": 3, "overrides": {"policy.backend": "dtensor"}}

    def losses(result):
        lines = (line.get("train_optim/loss") for line in result.metrics)
        return [loss for loss in lines if loss is not None]

    tuned = aligner.train_sft(model=folder, data=ANSWERS, output_dir=tmp_path / "sft", **common)
    preferred = aligner.train_dpo(model=tuned, data=PAIRS, output_dir=tmp_path / "dpo", **common)
    rated = aligner.train_reward(model=tuned, data=PAIRS, output_dir=tmp_path / "rm", **common)
    student = aligner.train_distill(
        model=folder, teacher=preferred, data=ANSWERS, output_dir=tmp_path / "small", **common
    )
    for result in (tuned, preferred, rated, student):
        assert losses(result)[-1] < losses(result)[0], result
    assert read_any(Path(os.fspath(rated))).config["reward_model_type"] == "binary_ranking"
    assert len(student.generate(["1 + 2 = "], max_new_tokens=2)) == 1
