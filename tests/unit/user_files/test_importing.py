"""Packages that nobody needs are not imported at start-up, and are there when somebody does."""

import importlib.metadata
import subprocess
import sys

import pytest

from aligner.importing import import_without

UNUSED = ("matplotlib", "scipy", "transformers", "wandb")


@pytest.mark.integration
def test_training_imports_nothing_that_it_does_not_use():
    code = (
        "import sys, aligner.algorithms.ppo.trainer\n"
        f"print([name for name in {UNUSED} if name in sys.modules])\n"
        "import matplotlib.pyplot, scipy.signal, transformers, wandb\n"
        "from lightning.pytorch.loggers.wandb import _WANDB_AVAILABLE\n"
        "from transformers.utils import is_scipy_available\n"
        "print(bool(_WANDB_AVAILABLE), is_scipy_available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["[]", "True True"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module that looks for a package and its version, and for one that is imported already."""
    (tmp_path / "greedy_module.py").write_text(
        "import importlib.metadata\n"
        "def raised(call, name):\n"
        "    try:\n"
        "        call(name)\n"
        "    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:\n"
        "        return type(error).__name__\n"
        "calls = (__import__, importlib.metadata.version)\n"
        "names = {n: [raised(call, n) for call in calls] for n in ('small_wheel', 'pytest')}\n"
    )
    (tmp_path / "small_wheel.py").write_text("")
    (tmp_path / "small_wheel-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: small_wheel\nVersion: 1.0\n"
    (tmp_path / "small_wheel-1.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "greedy_module"
    for name in ("greedy_module", "small_wheel"):
        sys.modules.pop(name, None)


def test_a_module_finds_packages_absent_while_it_is_imported(package):
    import_without(package, "small_wheel", "pytest")
    assert sys.modules[package].names == {
        "small_wheel": ["ModuleNotFoundError", "PackageNotFoundError"],
        "pytest": [None, None],
    }
    __import__("small_wheel")
    assert importlib.metadata.version("small_wheel") == "1.0"


def test_packages_are_found_again_where_the_module_raises(package, tmp_path):
    (tmp_path / "greedy_module.py").write_text("import small_wheel")
    with pytest.raises(ModuleNotFoundError, match="small_wheel"):
        import_without(package, "small_wheel")
    __import__("small_wheel")
