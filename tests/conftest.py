"""Fixtures that every folder of tests shares, and the rules of unit tests (`make unit`)."""

import _posixsubprocess
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


UNIT_FOLDER = Path(__file__).parent / "unit"
# A test with one of these markers is not a unit test.
OTHER_MARKERS = {
    *("integration", "browser", "smollm2", "ray", "ray_heavy"),
    *("vllm", "gpu", "extended"),
}
PROCESS_EVENTS = {"fork", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
MODEL_CLASSES = {
    "megatron.core.transformer.module": "MegatronModule",
    "transformers.modeling_utils": "PreTrainedModel",
}
_is_unit_test = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the unit tests. Spread the files of other folders evenly among those of `tests/unit`.

    Several pytest processes then seldom run files together that each start processes, or that each
    wait. The last files are short.
    """
    folders: dict[bool, dict[Path, None]] = {True: {}, False: {}}
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        is_in_unit = UNIT_FOLDER in item.path.parents
        folders[is_in_unit][item.path] = None
        if is_in_unit and not markers & OTHER_MARKERS:
            item.add_marker("unit")
    share = {True: 1.0, False: 0.9}
    places = {
        path: share[is_in_unit] * number / len(paths)
        for is_in_unit, paths in folders.items()
        for number, path in enumerate(paths)
    }
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Give each file to one process, in the order above, and `tests/dry` as if it were one file.

    All cases of the dry device are forks of one process, which takes long to start.
    """
    config.option.loadscopereorder = False
    return Files(config, log)


class Files(LoadFileScheduling):
    """Shares out files of tests."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/dry" if nodeid.startswith("tests/dry/") else super()._split_scope(nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """In `make unit`, fail tests that start a process or build a model."""
    global _is_unit_test
    _is_unit_test = item.config.getoption("markexpr") == "unit"
    with _without_models_and_processes() if _is_unit_test else nullcontext():
        yield
    _is_unit_test = False


@contextmanager
def _without_models_and_processes() -> Iterator[None]:
    """Let constructors of models fail, and multiprocessing, which raises no audit event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_posixsubprocess, "fork_exec", lambda *args: _refuse_process("fork", args))
        for module, name in MODEL_CLASSES.items():
            if module in sys.modules:
                patch.setattr(getattr(sys.modules[module], name), "__init__", _refuse_model)
        yield


def _refuse_model(*args: Any, **kwargs: Any) -> None:
    pytest.fail("a unit test builds a model. Give the test the marker 'integration'")


def _refuse_process(event: str, args: tuple) -> None:
    if _is_unit_test and event in PROCESS_EVENTS:
        pytest.fail(f"a unit test starts a process ({event}). Give it the marker 'integration'")


sys.addaudithook(_refuse_process)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_nemo(tmp_path_factory) -> Path:
    """The tiny random model of the tiny recipes."""
    from aligner.examples.tasks.tiny_model import write_tiny_nemo

    path = tmp_path_factory.mktemp("models") / "tiny.nemo"
    write_tiny_nemo(path)
    return path


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The teacher that the header of the distillation recipe makes."""
    from aligner.examples.tasks.tiny_model import write_tiny_nemo

    path = tmp_path_factory.mktemp("models") / "tiny_teacher.nemo"
    write_tiny_nemo(path, seed=1, hidden_size=128, scale=0.06)
    return path


@pytest.fixture(scope="session")
def reward_nemo(tiny_nemo, tmp_path_factory) -> Path:
    """A reward model whose head was not trained, and that gives different scores."""
    from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo

    model = load_from_nemo(MegatronGPTRewardModel, restore_path=tiny_nemo)
    model.gpt.rm_head.weight.data.normal_(generator=torch.Generator().manual_seed(4))
    path = tmp_path_factory.mktemp("models") / "reward.nemo"
    model.save_to(str(path))
    return path


@pytest.fixture(scope="session")
def dry_possible() -> None:
    """Skips where there can be no dry device, with the reason."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the dry device compiles a small library: needs g++ or clang++")
    if torch.version.cuda is not None:
        pytest.skip("the dry device needs a CPU build of torch")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library as its wheel installs it, outside of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of the sources, because setuptools writes into the folder that it builds.
    names = ["aligner", "aligner_environments", "aligner_plan", "conf", "examples"]
    for name in names:
        shutil.copytree(UNIT_FOLDER.parents[1] / name, folder / "sources" / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(UNIT_FOLDER.parents[1] / name, folder / "sources")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(folder / "sources")], check=True)
    (wheel,) = folder.glob("aligner-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True)
    return folder / "site"
