"""First tries of people who come from other libraries, with an installed wheel.

Each journey has data and functions in the form of the other library, no recipe, and one command or
script, as the page in question says.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from hub import hub
from pyarrow import parquet

from aligner.checkpoint.convert import nemo_to_hf

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

    def run(*arguments):
        command = [sys.executable, "-m", "aligner.commands", *arguments]
        return python_run(command, tmp_path, installed)

    return run


def python_run(command, folder, installed, **variables):
    environment = {**os.environ, "PYTHONPATH": str(installed), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


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
    done = aligner("train-ppo", *arguments.values())
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
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
    done = aligner(*arguments, killed)
    assert done.returncode == 0, done.stderr
    resumed = losses(metrics(tmp_path))
    assert aligner(*arguments, "exp_manager.explicit_log_dir=runs/second").returncode == 0
    (tmp_path / "runs" / "first").rename(tmp_path / "runs" / "killed")
    (tmp_path / "runs" / "second").rename(tmp_path / "runs" / "first")
    assert losses(metrics(tmp_path)) == resumed
    assert len(resumed) == 60


def losses(lines):
    """Step → loss. A killed run repeats steps that no state contains."""
    return {line["step"]: line["train_optim/loss"] for line in lines if "train_optim/loss" in line}


NEMO_RL = """
policy:
  model_name: hf
  tokenizer: {name: hf}
  train_global_batch_size: 16
  train_micro_batch_size: 4
  logprob_batch_size: 4
  max_total_sequence_length: 64
  precision: float32
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1}
  max_grad_norm: 1.0
  generation: {backend: megatron, max_new_tokens: 4, temperature: 1.0, top_p: 1.0, top_k: null}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 2, val_period: 0}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28}
data: {dataset_name: OpenMathInstruct-2}
cluster: {gpus_per_node: 1, num_nodes: 1}
checkpointing: {checkpoint_dir: runs/first, save_period: 5}
"""


def test_a_file_of_nemo_rl_is_a_command(aligner, tmp_path, tiny_nemo):
    nemo_to_hf(tiny_nemo, tmp_path / "hf")
    (tmp_path / "grpo.yaml").write_text(NEMO_RL)
    write(
        tmp_path / "rows.jsonl", [{"prompt": f"{i}+0=", "ground_truth": str(i)} for i in range(8)]
    )
    (tmp_path / "rewards.py").write_text(TRL.replace("answer", "ground_truth"))
    printed = aligner("translate", "grpo.yaml").stdout
    command = printed.partition("aligner ")[2].replace("\\\n", " ")
    own = ["data.train.source=rows.jsonl", "reward.function=rewards.py:reward"]
    done = aligner(*shlex.split(command), *own)
    assert done.returncode == 0, printed + done.stdout + done.stderr
    assert metrics(tmp_path)[-1]["train_rollouts/rewards"] == 1.0


# As in docs/environments.md. Agents of prime-rl and verifiers have such clients, too.
AGENT = """
import json
import os
import sys

import httpx

task = json.load(sys.stdin)
policy = httpx.Client(
    base_url=os.environ["OPENAI_BASE_URL"],
    headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    timeout=3600,
)
messages = [{"role": "user", "content": task["prompt"]}]
answer = policy.post("/chat/completions", json={"messages": messages}).raise_for_status()
reward = float(len(answer.json()["choices"][0]["message"]["content"]) > 0)
policy.post("/reward", json={"reward": {"reward": reward, "accuracy": reward}})
"""


def test_an_agent_of_prime_rl_is_trained_behind_openais_interface(aligner, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    write(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)])
    sampling = [value for value in SAMPLING if not value.startswith(("reward.", "data."))]
    done = aligner(
        *("train-reinforce", *SMALL, *sampling, "data.train.source=rows.jsonl"),
        *("reward=environment", "environment.kind=endpoint", "environment.max_tokens=200"),
        f"environment.command={sys.executable} agent.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(tmp_path)[-1]["train_rollouts/rewards"] > 0.9


def test_pairs_are_learned_by_kto(aligner, tmp_path):
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "x"} for i in range(32)]
    write(tmp_path / "pairs.json", pairs)
    sizes = ["trainer.dpo.max_steps=4", "model.global_batch_size=16", "model.optim.lr=1e-3"]
    source = ["data.train.source=pairs.json", "trainer.dpo.loss=kto", "trainer.dpo.max_epochs=4"]
    done = aligner("train-dpo", *SMALL, *source, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a labelled response from each response of a pair" in " ".join(done.stdout.split())
    first, *_, last = losses(metrics(tmp_path)).values()
    assert last < first


TOOL = '''
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


def reward(completions, answer, **kwargs):
    return [float(len(c[-1]["content"]) > 0 and int(a) >= 0) for c, a in zip(completions, answer)]
'''
TOOL_SCRIPT = """
import aligner

result = aligner.train_grpo(
    model="tiny.nemo",
    data=[{"prompt": f"What is {i} * 2?", "answer": str(i * 2)} for i in range(8)],
    tools=[multiply],
    reward=reward,
    max_steps=1,
    samples_per_step=8,
    max_new_tokens=4,
    output_dir="runs/first",
    overrides={"environment.max_tokens": 250},
)
"""


@pytest.mark.parametrize("language", ["shell", "python"])
def test_functions_are_tools(aligner, tmp_path, installed, language):
    if language == "shell":
        (tmp_path / "tools.py").write_text(TOOL)
        rows = [{"prompt": f"What is {i} * 2?", "answer": str(i * 2)} for i in range(16)]
        write(tmp_path / "rows.jsonl", rows)
        sampling = [value for value in SAMPLING if not value.startswith(("reward.", "data."))]
        done = aligner(
            *("train-reinforce", *SMALL, *sampling, "data.train.source=rows.jsonl"),
            *("reward=environment", "environment.tools=[tools.py:multiply]"),
            *("environment.kwargs.reward=tools.py:reward", "environment.max_tokens=250"),
        )
    else:
        (tmp_path / "notebook.py").write_text(TOOL + TOOL_SCRIPT)
        done = python_run([sys.executable, "notebook.py"], tmp_path, installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(tmp_path)[-1]["train_rollouts/rewards"] > 0.5


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
    done = aligner("train-reward", *SMALL, "data.train.source=pairs.jsonl", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    done = aligner("convert", "--input", "runs/first/reward_model.nemo", "--output", "reward_hf")
    assert done.returncode == 0, done.stderr
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
    sampling = [value for value in SAMPLING if not value.startswith(("reward.", "data."))]
    model = ["reward=model", "reward.model.restore_from_path=reward_hf"]
    model.append("critic.restore_from_path=reward_hf")
    rows = ["data.train.source=rows.jsonl", "data.ground_truth_column=null"]
    done = aligner("train-ppo", *SMALL, *sampling, *model, *rows)
    assert done.returncode == 0, done.stdout + done.stderr


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
TRL_SCRIPTS = {  # name in the docs: function, data set, its rows, another keyword
    "SFT": ("sft", "Capybara", lambda i: {"messages": [USER, FIVE], "source": "x"}, ""),
    "GRPO": (
        *("grpo", "DeepMath-103K", lambda i: {"prompt": [USER], "solution": "5"}),
        'reward="aligner.rewards.math_verify:reward",',
    ),
    "DPO": (
        *("dpo", "ultrafeedback_binarized"),
        *(lambda i: {"chosen": [USER, FIVE], "rejected": [USER, SEVEN], "score_chosen": 1.0}, ""),
    ),
    "reward model": (
        *("reward", "ultrafeedback_binarized"),
        *(lambda i: {"chosen": [USER, FIVE], "rejected": [USER, SEVEN], "score_chosen": 1.0}, ""),
    ),
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
