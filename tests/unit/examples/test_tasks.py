"""Tasks of examples/tasks: apart from the library, and known by their earlier paths too."""

import ast
import importlib

import pytest
from ranks import run_script
from recipes import ROOT, composed

from aligner.algorithms.run.directory import config_changes
from aligner.algorithms.run.identity import RunIdentity
from aligner.compat.paths import MOVED, current_path
from aligner.config import RunConfig, load_config
from aligner.importing import load_function

TASKS = sorted((ROOT / "examples" / "tasks").glob("*.py"))


def imports_of(path):
    """Module and name of everything that a file imports from a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("module", MOVED)
def test_an_earlier_path_names_the_same_objects(module):
    target = MOVED[module]
    home = importlib.import_module(target if target.startswith("aligner_") else f"aligner.{target}")
    names = [
        name
        for name, value in vars(home).items()
        if callable(value) and value.__module__ == home.__name__ and not name.startswith("_")
    ]
    assert names
    for name in names:
        assert load_function(f"aligner.{module}:{name}", key="key") is getattr(home, name)
        assert current_path(f"aligner.{module}:{name}") == f"{home.__name__}:{name}"
    assert current_path(f"aligner.{module}s:f") == f"aligner.{module}s:f"  # another module


def test_a_module_that_lost_some_names_refuses_others():
    with pytest.raises(AttributeError, match=r"environments.tools' has no attribute 'calculators'"):
        importlib.import_module("aligner.environments.tools").calculators  # noqa: B018


@pytest.mark.integration
def test_the_earlier_command_runs(tmp_path):
    for module in ("aligner.checkpoint.tiny", "aligner.examples.tasks.tiny_model"):
        run_script(module, "--output", f"{module}.nemo", folder=tmp_path).check_returncode()
    first, second = (path.read_bytes() for path in tmp_path.iterdir())
    assert first == second


def test_a_run_begun_by_an_earlier_path_is_the_same_run():
    games = {f"data.{part}.source": "games:guessing_games" for part in ("train", "validation")}
    games["environment.factory"] = "games:GuessingGame"

    def run(package):
        settings = [f"{key}=aligner.{package}.{value}" for key, value in games.items()]
        return load_config(composed("ppo_tiny_guessing_cpu", *settings), RunConfig)

    before, now = run("environments"), run("examples.tasks")
    identity = RunIdentity.of(before).as_dict()
    assert "aligner.environments.games" in identity["data"]["data.train.source"]["content"]
    saved = RunIdentity.saved({"config": before.as_dict(), "identity": identity})
    assert RunIdentity.of(now).refusals(saved, []) == []
    assert config_changes(before.as_dict(), now.as_dict()) == []


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_task_uses_public_names_only(path):
    ours = [f"{module}.{name}" for module, name in imports_of(path) if module[:7] == "aligner"]
    assert [name for name in ours if "._" in name] == []


@pytest.mark.integration
def test_the_library_imports_no_task():
    files = ROOT.glob("aligner*/**/*.py")
    found = [path for path in files if any("aligner.examples" in m for m, _ in imports_of(path))]
    assert found == []
