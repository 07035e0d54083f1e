"""Cases of `test_dry_state`: shares of a role on their way from the device to files and back."""

import gc
from pathlib import Path

import torch
from dry_roles import ready
from torch.distributed.tensor import DTensor

from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.worker_state import seal
from aligner.models.worker import RoleWorker
from aligner_plan.dry.device import DryDevice


def round_trip(folder, **case):
    """What every process does when it saves, and when another one in its place loads that."""
    folder, ranks = Path(folder), range(case.get("world", 1))
    found = [_save(folder, rank, case) for rank in ranks]
    seal(folder, len(ranks))
    return [
        {**saved, **_load(folder, rank, case)} for rank, saved in zip(ranks, found, strict=True)
    ]


def _save(folder, rank, case):
    with DryDevice(case.get("world", 1), rank) as device:
        worker, update = _trained(case)
        update()
        if case.get("offload"):
            worker.prepare_for_inference()
        gc.collect()
        before = device.memory.alive_bytes
        with device.record() as record:
            worker.begin_saving(str(folder), True)
        at_work = device.memory.alive_bytes - before
        worker.prepare_for_training()
        update()  # while the share is written
        failure = worker.saving_failure(wait=True)
        return {
            "failure": failure,
            "parameters": sum(_local(each).numel() for each in worker.model.model.parameters()),
            "owned": sum(each.main.numel() for each in _slices(worker.model)),
            "saved_bytes": record.copied_bytes,
            "saving_waits": dict(record.host_waits),
            "left_bytes": at_work,
        }


def _load(folder, rank, case):
    with DryDevice(case.get("world", 1), rank) as device:
        worker, update = _trained(case)
        if case.get("offload"):
            worker.prepare_for_inference()
        gc.collect()
        before = device.memory.alive_bytes
        with device.record() as record:
            worker.load_state(str(folder))
        gc.collect()
        loaded = device.memory.alive_bytes - before
        worker.prepare_for_training()
        places = set()
        for owned in _slices(worker.model):
            moments = owned.moments()
            assert len(moments) == 2
            for tensor in (owned.main, *moments.values()):
                places.add(f"{tensor.device} {tensor.dtype} {tensor.shape == owned.main.shape}")
        steps = worker.model.optimizer.steps
        update()
        return {
            "loaded_bytes": record.copied_bytes,
            "loading_waits": record.host_reads,
            "tensors": len(list(worker.model.model.parameters())),
            "alive_bytes": loaded,
            "places": sorted(places),
            "steps": steps,
        }


def _trained(case):
    role, batch, passes = ready(case)
    worker = RoleWorker(role, role.parallel)

    def update():
        role.prepare_for_training()
        assert role.training_update(batch, mbs=passes)["skipped"] == 0.0
        role.finish_training()

    return worker, update


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _slices(role):
    found = role.optimizer.owned_slices()
    return [each[1] if isinstance(each, tuple) else each for each in found]


class _Workers:
    num_shares = 1

    def __init__(self, worker):
        self._worker = worker

    def begin_saving(self, folder, in_background):
        self._worker.begin_saving(str(folder), in_background)

    def check_saving(self, wait):
        failure = self._worker.saving_failure(wait)
        assert failure is None, failure


def stored(folder):
    case = {"role": "actor", "precision": "bf16"}
    with DryDevice() as device:
        worker, update = _trained(case)
        update()
        mean = torch.full((3,), 2.0).to("cuda")
        store = RunStateStore(folder)
        gc.collect()
        before = device.memory.alive_bytes
        store.save(
            1,
            {"progress": {"step": 1}, "scales": {"mean": mean}},
            roles={"policy": _Workers(worker)},
            in_background=True,
        )
        mean.zero_()
        update()
        store.finish()
        gc.collect()
        left = device.memory.alive_bytes - before
    with DryDevice():
        store = RunStateStore(folder)
        worker, update = _trained(case)
        latest = store.states()[-1].path
        loaded = store.load(latest)
        worker.load_state(str(latest / "policy"))
        steps = worker.model.optimizer.steps
        update()
        return {
            "left_bytes": left,
            "progress": loaded.state["progress"],
            "mean": loaded.state["scales"]["mean"].tolist(),
            "steps": steps,
        }
