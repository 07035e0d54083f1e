"""Runs that Python functions start, to their results."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from first_tries import python_run

import aligner
from aligner.errors import CheckpointNotFoundError, ConfigError, DataError, StorageError
from aligner.observe.metrics import read_metrics
from aligner.parallel.groups import shutdown_parallel

DATA = [{"prompt": f"{i} + 2 = "} for i in range(16)]


def digits(prompts, responses, **columns):
    assert columns["ground_truths"] == [None] * len(prompts)
    return [float(response[:1].isdigit()) for response in responses]


by_lambda = lambda p, r, **columns: digits(p, r, **columns)  # noqa: E731


OWNER = """
import pathlib, sys
from aligner.observe.run_lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def stored_files(folder):
    return {path.name: path.read_bytes() for path in (folder / "python").iterdir()}


def random_numbers(seeded=True):
    """One number of each generator. ``seeded``: then set the state before the number again."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    numbers = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    if seeded:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
    return numbers


def train(tiny_nemo, folder, reward=digits, **keywords):
    keywords = {"max_steps": 3, "lr": 6e-3, "samples_per_step": 16, "max_new_tokens": 3, **keywords}
    return aligner.train_grpo(
        model=tiny_nemo, data=DATA, reward=reward, output_dir=folder, **keywords
    )


@pytest.fixture(scope="module")
def result(tiny_nemo, tmp_path_factory):
    shutdown_parallel()  # groups of other tests in this process
    numbers, hook = random_numbers(), sys.excepthook
    # A lambda cannot be imported by name.
    found = train(tiny_nemo, tmp_path_factory.mktemp("api") / "run", by_lambda)
    assert random_numbers(seeded=False) == numbers
    assert sys.excepthook is hook
    return found


def test_the_result_has_what_the_run_wrote(result, tmp_path):
    assert [line["step"] for line in result.metrics] == [0, 1, 2, 3]
    assert 0 <= result.metrics[-1]["train_rollouts/rewards"] <= 1
    assert result.report.exists()
    assert result.best["step"] == 3
    assert result.best["path"].is_dir()
    assert len(result.to_pandas()) == 4
    assert (result.folder / "python" / "command.sh").read_text() == f"{result.command}\n"
    assert result.command.startswith("aligner train-reinforce ")
    assert result.value is None


def test_the_policy_generates_scores_and_is_saved(result, tmp_path):
    numbers, hook = random_numbers(), sys.excepthook
    prompts = ["1 + 1 = ", "1 + 1 = ", "2 + 3 = "]
    answers = result.generate(prompts, max_new_tokens=4, seed=7)
    assert answers == result.generate(prompts, max_new_tokens=4, seed=7)
    assert answers[0] != answers[1]
    first = answers[0][:1]
    options = {"max_new_tokens": 4, "seed": 7}
    stopped = [result.generate(prompts, stop=stop, **options) for stop in (first, [first])]
    assert stopped[0] == stopped[1] != answers
    logprobs = result.policy.logprobs(["1 + 1 = "] * 2, ["23", "4"])
    assert [len(row) for row in logprobs] == [2, 1]
    assert result.policy.logprobs([], []) == []
    with pytest.raises(DataError, match=r"2 prompts.* 1 responses"):
        result.policy.logprobs(["1 + 1 = "] * 2, ["23"])
    assert random_numbers(seeded=False) == numbers
    assert sys.excepthook is hook
    result.save(tmp_path / "hf")
    result.policy.save(tmp_path / "policy.nemo")
    for path in (tmp_path / "hf", tmp_path / "policy.nemo", os.fspath(result)):
        with aligner.load_model(path) as model:
            again = model.logprobs(["1 + 1 = "] * 2, ["23", "4"])
            assert again == [pytest.approx(row, abs=1e-5) for row in logprobs]
    with pytest.raises(ConfigError, match="exists"):
        result.save(tmp_path / "hf")


PORTS = """
import gc, sys
import aligner, psutil
with aligner.load_model(sys.argv[1]) as model:
    pass
del model
gc.collect()
print([each for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"])
"""


def test_no_port_is_open_after_the_last_model(tiny_nemo):
    done = subprocess.run([sys.executable, "-c", PORTS, str(tiny_nemo)], capture_output=True)
    assert done.stdout.splitlines()[-1] == b"[]", done.stderr


def test_the_groups_of_this_process_end_with_the_last_model(result):
    with aligner.load_model(os.fspath(result)):
        assert torch.distributed.is_initialized()
    result.policy.close()
    del result.__dict__["policy"]
    assert not torch.distributed.is_initialized()


def test_a_changed_reward_is_refused_and_the_same_call_continues(
    result, tiny_nemo, tmp_path, capsys
):
    stored = stored_files(result.folder)
    assert len(result.metrics) == 4  # read before the run continues
    with pytest.raises(ConfigError, match=r"reward\.function.*different content"):
        train(tiny_nemo, result.folder, lambda p, r, **k: [0.0] * len(p), max_steps=4)
    assert stored_files(result.folder) == stored
    # Neither are the files of a run that another process continues, or starts.
    (tmp_path / "python").mkdir()
    capsys.readouterr()
    for folder in (result.folder, tmp_path):
        command = [sys.executable, "-c", OWNER, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            assert owner.stdout.readline() == b"locked\n"
            with pytest.raises(StorageError, match="another process"):
                train(tiny_nemo, folder, by_lambda, max_steps=4)
    assert "command line" not in capsys.readouterr().out  # printed after the files are written
    assert stored_files(result.folder) == stored
    longer = train(tiny_nemo, result.folder, by_lambda, max_steps=4)
    assert [line["step"] for line in longer.metrics] == [0, 1, 2, 3, 4]
    rewards = [[m.get("train_rollouts/rewards") for m in r.metrics] for r in (result, longer)]
    assert rewards[1][:4] == rewards[0]
    assert "step 4/4" in capsys.readouterr().out


def test_the_errors_of_a_run_are_raised_and_leave_nothing(tiny_nemo, tmp_path, capsys):
    with pytest.raises(CheckpointNotFoundError, match=r"missing\.nemo.*model\.restore_from_path"):
        train(tmp_path / "missing.nemo", tmp_path / "run")
    with pytest.raises(DataError):
        aligner.train_dpo(model=tiny_nemo, data=[], output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "CheckpointNotFoundError" not in capsys.readouterr().err


CTRL_C = """
import sys
import aligner

def slow(prompts, responses, **columns):
    import time
    time.sleep(0.5)
    return [0.0] * len(prompts)

try:
    aligner.train_grpo(
        model=sys.argv[1], data=[{"prompt": f"{i} "} for i in range(16)], reward=slow,
        max_steps=500, samples_per_step=16, max_new_tokens=2, output_dir=sys.argv[2],
    )
except KeyboardInterrupt:
    print("interrupted")
"""


def begun(nemo, folder, steps):
    """The process of such a script, once its run has written ``steps`` lines of metrics."""
    words = [sys.executable, "-c", CTRL_C, str(nemo), str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        if len(read_metrics(folder / "metrics.jsonl")) >= steps:
            break
        time.sleep(0.2)
    return process


@pytest.mark.extended
def test_ctrl_c_saves(tiny_nemo, tmp_path):
    folder = tmp_path / "run"
    process = begun(tiny_nemo, folder, 4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert output.endswith("interrupted\n")
    last = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / "run_state" / f"step_{last:06d}" / "manifest.json").exists()


@pytest.mark.extended
def test_a_run_ends_with_its_caller(tiny_nemo, tmp_path):
    process = begun(tiny_nemo, tmp_path / "run", 1)
    runs = psutil.Process(process.pid).children(recursive=True)
    assert runs
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(runs, timeout=30)
    assert alive == []


@pytest.mark.extended
def test_models_of_a_tensor_parallel_run_are_loaded_into_one_process(tiny_nemo, tmp_path):
    layout = {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True}
    sizes = {"max_steps": 2, "samples_per_step": 16, "max_new_tokens": 3, "devices": 2}
    options = {"reward": digits, "output_dir": tmp_path / "run", "overrides": layout}
    result = aligner.train_ppo(model=tiny_nemo, data=DATA, **sizes, **options)
    assert [len(row) for row in result.value.values(["1 + 1 = "], ["23"])] == [2]
    with aligner.load_model(os.fspath(result)) as model:
        expected = model.logprobs(["1 + 1 = "], ["23"])[0]
    assert result.policy.logprobs(["1 + 1 = "], ["23"])[0] == pytest.approx(expected, abs=1e-5)


# The last line of each script, as values, and the smallest that they may be.
PROMISES = {"grpo": 0.9, "ppo": 0.9, "environment": 0.4, "dpo": 1.0}


@pytest.mark.extended
@pytest.mark.parametrize("script", [*PROMISES, "sft"])
def test_the_scripts_learn_from_an_installed_wheel(script, tiny_nemo, tmp_path, installed):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.nemo").symlink_to(tiny_nemo)
    path = installed / "aligner" / "examples" / "python" / f"{script}.py"
    program = [sys.executable, "-c", "import aligner; print(aligner.__file__)"]
    imported = python_run(program, tmp_path, installed)
    assert imported.stdout == f"{installed}/aligner/__init__.py\n"
    done = python_run([sys.executable, str(path)], tmp_path, installed)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    if script == "sft":
        assert float(last.split()[0]) < 0.2
        assert "['4']" in last
    else:
        assert float(last.split()[0]) >= PROMISES[script]


@pytest.mark.extended
def test_a_notebook(tiny_nemo, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [
        "import aligner\n\ndef reward(prompts, responses, **columns):\n"
        "    return [float('4' in response) for response in responses]",
        f"result = aligner.train_grpo(model={str(tiny_nemo)!r},"
        " data=[{'prompt': '2 + 2 = '}] * 16, reward=reward, max_steps=2, samples_per_step=16,"
        " max_new_tokens=2, output_dir='four')",
        "print(len(result.metrics), len(result.generate(['2 + 2 = '])))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = ["".join(part.get("text", "") for part in cell.outputs) for cell in notebook.cells]
    assert "step 2/2" in outputs[1]
    assert outputs[2].splitlines()[-1] == "3 1"
    assert json.loads((tmp_path / "four" / "run.json").read_text())["saved"]
