"""First tries with an installed wheel: reward functions, tools and agents."""

import shlex
import sys

import pytest
from first_tries import LENGTHS, SAMPLING, SMALL, metrics, python_run, write

from aligner.checkpoint.convert import nemo_to_hf

pytestmark = pytest.mark.extended

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
    assert library in done.stdout  # the start-up report names the form
    rewards = [line.get("train_rollouts/rewards") for line in metrics(tmp_path)]
    assert rewards[-2:] == [1.0, 1.0]
    assert (tmp_path / "runs" / "first" / "policy.nemo").is_file()


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
    aligner(*shlex.split(command), *own)
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
    aligner(
        *("train-reinforce", *SMALL, *LENGTHS, "data.train.source=rows.jsonl"),
        *("reward=environment", "environment.kind=endpoint", "environment.max_tokens=200"),
        f"environment.command={sys.executable} agent.py",
    )
    assert metrics(tmp_path)[-1]["train_rollouts/rewards"] > 0.9


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
        aligner(
            *("train-reinforce", *SMALL, *LENGTHS, "data.train.source=rows.jsonl"),
            *("reward=environment", "environment.tools=[tools.py:multiply]"),
            *("environment.kwargs.reward=tools.py:reward", "environment.max_tokens=250"),
        )
    else:
        (tmp_path / "notebook.py").write_text(TOOL + TOOL_SCRIPT)
        done = python_run([sys.executable, "notebook.py"], tmp_path, installed)
        assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(tmp_path)[-1]["train_rollouts/rewards"] > 0.5
