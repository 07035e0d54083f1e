"""First tries with an installed wheel: scripts and notebooks."""

import sys

import pytest
from first_tries import python_run, write
from hub import hub

from aligner.checkpoint.convert import nemo_to_hf

pytestmark = pytest.mark.extended

# The first script of a page of TRL, with names of the hub. docs/python.md compares the lines.
SCRIPT = """
import aligner

aligner.train_{algorithm}(
    model="Qwen/Qwen2.5-0.5B",
    data="trl-lib/{data}",{keyword}
    overrides={{"download": True}},{sizes}
)
"""
USER, FIVE, SEVEN = (
    {"role": role, "content": text}
    for role, text in (("user", "2+3?"), ("assistant", "5"), ("assistant", "7"))
)
PAIR = {"chosen": [USER, FIVE], "rejected": [USER, SEVEN], "score_chosen": 1.0}
TRL_SCRIPTS = {  # name in the docs: function, data set, its rows, another keyword
    "SFT": ("sft", "Capybara", lambda i: {"messages": [USER, FIVE], "source": "x"}, ""),
    "GRPO": (
        *("grpo", "DeepMath-103K", lambda i: {"prompt": [USER], "solution": "5"}),
        'reward="aligner.rewards.math_verify:reward",',
    ),
    "DPO": ("dpo", "ultrafeedback_binarized", lambda i: PAIR, ""),
    "reward model": ("reward", "ultrafeedback_binarized", lambda i: PAIR, ""),
    "KTO": (
        *("dpo", "kto-mix-14k"),
        lambda i: {
            "prompt": [{"role": "user", "content": str(i)}],
            "completion": [FIVE],
            "label": i % 2 == 0,
        },
        'loss="kto",',
    ),
}


def script_of_trl(name, sizes=""):
    algorithm, data, _, keyword = TRL_SCRIPTS[name]
    keyword = keyword and f"\n    {keyword}"
    return SCRIPT.format(algorithm=algorithm, data=data, keyword=keyword, sizes=sizes)


def lines_of_scripts():
    """Lines that are not blank by name, for the table in docs/python.md."""
    return {name: sum(map(bool, script_of_trl(name).splitlines())) for name in TRL_SCRIPTS}


@pytest.mark.parametrize("name", TRL_SCRIPTS)
def test_the_first_script_of_trl_has_a_shorter_counterpart(tmp_path, tiny_nemo, installed, name):
    algorithm, data, row, _ = TRL_SCRIPTS[name]
    nemo_to_hf(tiny_nemo, tmp_path / "model")
    (tmp_path / "rows" / "data").mkdir(parents=True)
    write(tmp_path / "rows" / "data" / "train-00000-of-00001.parquet", [row(i) for i in range(8)])
    small = ["max_steps=1", "batch_size=4"]
    if algorithm == "grpo":
        small = ["max_steps=1", "samples_per_step=8", "num_generations=4", "max_new_tokens=4"]
    (tmp_path / "first.py").write_text(script_of_trl(name, ", ".join(["", *small])[1:]))
    repositories = {"models/Qwen/Qwen2.5-0.5B": "model", f"datasets/trl-lib/{data}": "rows"}
    with hub({key: tmp_path / folder for key, folder in repositories.items()}) as (url, served):
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        done = python_run([sys.executable, "first.py"], tmp_path, installed, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Qwen/Qwen2.5-0.5B/model.safetensors" in served
    assert list((tmp_path / "results" / algorithm).glob("*.nemo"))


def test_a_notebook_has_its_reward_and_a_quiet_model(tmp_path, tiny_nemo, installed):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    (tmp_path / "tiny.nemo").symlink_to(tiny_nemo)
    done = python_run([sys.executable, "notebook.py"], tmp_path, installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 1 True"
    assert done.stderr == ""  # no warnings of other libraries


NOTEBOOK = """
import aligner

def reward(completions, answer, **columns):
    return [float(a in c) for c, a in zip(completions, answer)]

result = aligner.train_grpo(
    model="tiny.nemo", data=[{"prompt": "2 + 2 = ", "answer": "4"}] * 16, reward=reward,
    max_steps=2, samples_per_step=16, max_new_tokens=2, output_dir="four",
)
with aligner.load_model("tiny.nemo") as model:
    answers = model.generate(["2 + 2 = "])
print(len(result.metrics), len(answers), result.report.is_file())
"""
