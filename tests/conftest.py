"""Fixtures that every folder of tests shares."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


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
def dry_possible() -> None:
    """Skips where there can be no dry device, with the reason."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the dry device compiles a small library: needs g++ or clang++")
    if torch.version.cuda is not None:
        pytest.skip("the dry device needs a CPU build of torch")
