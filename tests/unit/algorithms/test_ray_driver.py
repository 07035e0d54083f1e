"""The driver of a run on Ray asks no GPU anything; the report says what its workers compute on."""

from contextlib import ExitStack
from types import SimpleNamespace

import torch
from user_code import configured

from aligner.algorithms.run.engine import RayEngine
from aligner.device import accelerator
from aligner.device.accelerator import DeviceInfo
from aligner.distributed.workers import LocalFuture
from aligner.models.handle import RoleHandle


def test_the_driver_leaves_gpus_to_its_workers(monkeypatch, tmp_path):
    """A machine with a GPU, as torch would say, that is never asked."""
    monkeypatch.delenv("ALIGNER_FORCE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for question in ("synchronize", "mem_get_info", "get_device_name", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, question, None)  # to call it is an error
    config = configured(critic=True, cluster__engine="ray")
    accelerator.has_gpu.cache_clear()
    try:
        assert accelerator.has_gpu()
        with ExitStack() as closing:
            RayEngine(config, tmp_path, closing)
            accelerator.synchronize()
            assert accelerator.generator_state() is None
            assert not accelerator.device_info().has_gpu
            assert accelerator.device() == torch.device("cpu")
        assert accelerator.has_gpu()  # the run is over
    finally:
        monkeypatch.undo()
        accelerator.has_gpu.cache_clear()


def test_a_report_says_what_the_workers_compute_on():
    facts = [DeviceInfo("H200", True, 90), DeviceInfo("H200", True, 70)]
    group = SimpleNamespace(
        run_all_workers_single_data=lambda name: LocalFuture(facts),
        get_all_worker_results=lambda future: future.get_results(),
    )
    handle = SimpleNamespace(worker_group=group)
    assert RoleHandle.device_info(handle) == DeviceInfo("H200", True, 70)
