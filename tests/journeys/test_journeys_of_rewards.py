"""First tries with an installed wheel: reward functions and tools."""

import sys

import pytest
from first_tries import LENGTHS, SAMPLING, SMALL, metrics, python_run, write

pytestmark = pytest.mark.extended

TRL = """
def reward(completions, answer, **kwargs):
    assert all(isinstance(completion, str) for completion in completions)
    return [float(number.isdigit()) for number in answer]
"""


def test_a_reward_function_of_trl_is_called_as_trl_calls_it(aligner, tmp_path):
    write(tmp_path / "rows.jsonl", [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(16)])
    (tmp_path / "rewards.py").write_text(TRL)
    done = aligner("train-reinforce", *SMALL, *SAMPLING)
    assert "TRL" in done.stdout  # the start-up report names the form
    rewards = [line.get("train_rollouts/rewards") for line in metrics(tmp_path)]
    assert rewards[-2:] == [1.0, 1.0]
    assert (tmp_path / "runs" / "first" / "policy.nemo").is_file()


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
