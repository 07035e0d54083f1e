"""Wrong paths and signatures end a command before torch is imported, and leave no files."""

import subprocess
import sys

import pytest
from recipes import ROOT

from aligner.algorithms.run.inputs import _check_signature
from aligner.errors import ConfigError

DATA = ["data.train.source=rows.jsonl", "reward.function=rewards.py:reward"]
REWARDS = """
import package_that_is_not_installed
def reward(prompts, responses, ground_truths, *, scale: float = package_that_is_not_installed.X):
    return []
def completions_only(completions, **kwargs): return []
def one_list(responses): return []
async def asynchronous(prompts, responses, ground_truths): return []
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.restore_from_path=no.nemo", *DATA], "'no.nemo' does not exist"),
        (["critic.restore_from_path=no.nemo", *DATA], "Check critic.restore_from_path"),
        ([*DATA, "data.train.source=no.jsonl"], "file no.jsonl does not exist"),
        ([*DATA, "reward.function=no.py:reward"], "no.py does not exist"),
        ([*DATA, "reward.function=rewards.py:one_list"], "but its signature is (responses)"),
        ([*DATA, "model.tokenizer=" + "a" * 256], "at most 255 bytes between two slashes"),
    ],
)
def test_a_wrong_path_is_named_before_torch_is_imported(folder, tiny_nemo, overrides, message):
    arguments = [f"model.restore_from_path={tiny_nemo}", *overrides]
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train_gpt_ppo.py', *{arguments!r}, 'exp_manager.explicit_log_dir=run']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'examples/train_gpt_ppo.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('torch imported:', 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=folder
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "torch imported: False" in done.stdout
    assert not (folder / "run").exists()


def test_signatures_are_checked_without_running_the_file(folder):
    for function in ("reward", "completions_only", "asynchronous", "missing"):
        _check_signature(f"rewards.py:{function}", {})
    with pytest.raises(ConfigError, match=r"rewards\.py:asynchronous"):
        _check_signature("rewards.py:asynchronous", {"scale": 2.0})
