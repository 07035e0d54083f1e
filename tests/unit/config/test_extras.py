"""Extras of pyproject.toml: a missing package is named before a run, and runs without it work.

A package whose entry of ``sys.modules`` is None is neither found nor imported.
"""

import os
import subprocess
import sys
import tomllib
from contextlib import ExitStack

import pytest
from packaging.requirements import Requirement
from recipes import ROOT, composed

from aligner.algorithms.run.engine import open_engine
from aligner.config import load_config
from aligner.data.readers import read_rows
from aligner.data.tokenizers.gguf import gguf_values
from aligner.errors import ConfigError, MissingPackageError
from aligner.importing import load_function
from aligner.packages import OPTIONAL_PACKAGES, find_packages, require_extra

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [package.name for package in OPTIONAL_PACKAGES if package.extra == extra]
    for extra in PROJECT["optional-dependencies"]
    if extra != "all"
}
NAMES = [name for names in EXTRAS.values() for name in names]


@pytest.fixture
def without(monkeypatch):
    """``without(*names)``: these packages are not installed."""

    def block(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return block


def test_the_table_has_the_packages_of_pyproject():
    listed = {
        extra: [Requirement(text).name.replace("-", "_") for text in texts]
        for extra, texts in PROJECT["optional-dependencies"].items()
    }
    assert listed.pop("all") == ["aligner"]
    assert listed == EXTRAS
    (all_extras,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(all_extras).extras == set(EXTRAS)
    assert len(PROJECT["dependencies"]) <= 16


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_error_names_the_setting_the_packages_and_the_command(without, extra):
    without(*EXTRAS[extra])
    with pytest.raises(MissingPackageError) as raised:
        require_extra(extra, "a=b")
    packages, command = ", ".join(EXTRAS[extra]), f'pip install "aligner[{extra}]"'
    assert str(raised.value) == f"a=b needs {packages}, which is not installed. Run: {command}"


AGENT = [
    *("reward=environment", "reward.function=null", "~reward.kwargs"),
    *("environment.kind=endpoint", "environment.factory=a.b:agent"),
]


@pytest.mark.parametrize(
    ("package", "overrides", "setting"),
    [
        ("ray", ["cluster.engine=ray"], "cluster.engine=ray"),
        ("wandb", ["exp_manager.create_wandb_logger=true"], "create_wandb_logger=true"),
        ("httpx", ["reward=server", "reward.server.url=http://localhost"], "reward.kind=server"),
        ("uvicorn", AGENT, "environment.kind=endpoint"),
    ],
)
def test_a_run_is_refused_before_anything_starts(without, package, overrides, setting):
    config = load_config(composed("grpo_tiny_cpu", *overrides))
    without(package)
    with ExitStack() as closing, pytest.raises(MissingPackageError, match=setting) as raised:
        open_engine(config, closing)
    assert f"needs {package}, which is not installed" in str(raised.value)


def test_files_and_functions_are_refused(without, monkeypatch, tmp_path):
    without("gguf", "pyarrow", "math_verify", "reasoning_gym")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(MissingPackageError, match=r"a.parquet needs pyarrow.*aligner\[parquet\]"):
        list(read_rows(tmp_path / "a.parquet"))
    with pytest.raises(MissingPackageError, match=r"a.gguf needs gguf.*aligner\[gguf\]"):
        gguf_values(tmp_path / "a.gguf")
    for package, module, extra in (
        ("math_verify", "aligner.rewards.math_verify", "math"),
        ("reasoning_gym", "aligner.examples.tasks.reasoning", "tasks"),
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(ConfigError, match=rf"key=.*needs {package}.*aligner\[{extra}\]"):
            load_function(f"{module}:reward", key="key")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("serve", ["--model", "m.nemo"]),
        ("serve_reward_model", ["--model", "m.nemo", "--token-file", "token"]),
    ],
)
def test_servers_are_refused(tmp_path, script, arguments):
    (tmp_path / "m.nemo").touch()
    done = run_without(["fastapi"], script, arguments, tmp_path)
    assert done.returncode != 0
    assert 'needs fastapi, which is not installed. Run: pip install "aligner[serve]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_reports_name_what_is_missing(without):
    without("gguf")
    statuses = {status.package.name: status for status in find_packages()}
    assert statuses["gguf"].package.without == "GGUF files are refused"
    assert not statuses["gguf"].is_installed
    assert "pyarrow" not in statuses  # it is installed


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train_gpt_ppo", ["trainer.ppo.max_steps=1"]),
        pytest.param(
            "train_gpt_sft",
            ["--config-name", "recipes/sft_tiny_cpu", "trainer.sft.max_steps=1"],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_run_needs_no_extra(tiny_nemo, tmp_path, script, arguments):
    settings = [f"model.restore_from_path={tiny_nemo}", "exp_manager.explicit_log_dir=run"]
    done = run_without(NAMES, script, [*arguments, *settings], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'pip install "aligner[serve]"' in " ".join(done.stdout.split())
    assert (tmp_path / "run" / "policy.nemo").exists()


def run_without(names, script, arguments, folder):
    """A script of examples/ in a process of its own, with packages that cannot be imported."""
    path = ROOT / "examples" / f"{script}.py"
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({names!r}))\n"
        f"sys.argv = {[str(path), *arguments]!r}\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "timeout": 200}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, **options, capture_output=True, text=True, check=False)
