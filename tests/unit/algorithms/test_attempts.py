"""Attempts of a run: dead workers are restarted, other errors end it. The driver uses no GPU."""

import io
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from user_code import configured

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.run.engine import RayEngine
from aligner.algorithms.run.run import Run
from aligner.device import accelerator
from aligner.device.accelerator import DeviceInfo
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError, WorkerDiedError
from aligner.models.handle import RoleHandle


class Engine:
    """Clusters that write down when they end; the one of number ``breaks`` cannot be made."""

    def __init__(self, max_restarts, breaks=None):
        self.max_restarts, self.breaks = max_restarts, breaks
        self.log, self.made = [], 0

    def clusters(self, closing):
        number, self.made = self.made, self.made + 1
        closing.callback(self.log.append, f"clusters {number} end")
        if number == self.breaks:
            raise ConfigError("no room")
        return number


class Role:
    def __init__(self, log, name, dies=False):
        self.log, self.name, self.dies = log, name, dies

    def shutdown(self):
        self.log.append(f"{self.name} ends")
        if self.dies:
            raise WorkerDiedError(f"{self.name} died in shutdown")


def run_on(engine):
    console = Console(file=io.StringIO(), width=300)
    config = SimpleNamespace(dry_run=False)
    return Run(config, engine, console, Callbacks(), None, None, ExitStack())


def attempted(engine, error=None, *roles):
    """Every attempt of a run: it has the roles, and raises the error."""
    for attempt in run_on(engine).attempts():
        with attempt as workers:
            for role in roles:
                workers.own(role)
            if error is not None:
                raise error


def test_only_deaths_begin_another_attempt_and_roles_end_in_reverse_order():
    engine = Engine(max_restarts=3)
    attempted(engine, None, Role(engine.log, "policy"), Role(engine.log, "critic"))
    assert engine.log == ["critic ends", "policy ends", "clusters 0 end"]
    for error in (ConfigError("bad"), KeyboardInterrupt()):
        engine = Engine(max_restarts=3)
        with pytest.raises(type(error)):
            attempted(engine, error)
        assert engine.log == ["clusters 0 end"]


def test_after_a_death_the_workers_are_started_again_and_it_is_said():
    engine = Engine(max_restarts=2)
    run, seen = run_on(engine), []
    for attempt in run.attempts():
        with attempt as workers:
            seen.append(workers.clusters)
            workers.own(Role(engine.log, "policy"))
            if len(seen) < 3:
                raise WorkerDiedError("policy 1 died in train")
    assert seen == [0, 1, 2]
    assert engine.log == [
        line for number in seen for line in ("policy ends", f"clusters {number} end")
    ]
    said = run.console.file.getvalue()
    assert said.count("policy 1 died in train\nThe workers are restarted") == 2
    assert "(restart 2 of cluster.max_restarts=2)" in said


def test_deaths_without_a_restart_at_shut_down_and_clusters_that_cannot_be_made():
    for max_restarts in (0, 1):
        engine = Engine(max_restarts)
        with pytest.raises(WorkerDiedError, match="again"):
            attempted(engine, WorkerDiedError("again"))
        assert len(engine.log) == engine.made == max_restarts + 1
    engine = Engine(max_restarts=1)
    with pytest.raises(WorkerDiedError, match="died in shutdown"):
        attempted(engine, None, Role(engine.log, "policy", dies=True))
    assert engine.log == ["policy ends", "clusters 0 end", "policy ends", "clusters 1 end"]
    engine = Engine(max_restarts=1, breaks=0)
    with pytest.raises(ConfigError, match="no room"):
        attempted(engine, AssertionError("there is nothing to run on"))
    assert engine.log == ["clusters 0 end"]


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
