"""Tests of a GPU, and their rehearsal on the CPU.

`make test-gpu` runs every test that takes ``device`` on the GPU, or skips it and says why. The
default run makes the same calls on the CPU, so that the tests themselves are known to work.
"""

import gc

import pytest
import torch

from aligner.device import accelerator


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        devices = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]
        metafunc.parametrize("device", devices, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request):
    """``cuda`` or ``cpu``: where this process computes."""
    here = "cuda" if accelerator.has_gpu() else "cpu"
    if request.param == "cuda" and here == "cpu":
        pytest.skip("no CUDA device can be used here; ALIGNER_FORCE_CPU=1 hides one too")
    if request.param == "cpu" and here == "cuda":
        pytest.skip("this process computes on the GPU; ALIGNER_FORCE_CPU=1 rehearses on the CPU")
    return here


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    from facts import write_models

    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
def allocated(device):
    """Reads the bytes that tensors take on the GPU; None on the CPU."""

    def read():
        gc.collect()
        return torch.cuda.memory_allocated() if device == "cuda" else None

    return read
