"""Cases of `test_dry_handover`.

vLLM is replaced here by an engine that copies weights, in a process, a thread and on a stream of
its own, as vLLM does. The rest is the library's own code on fake GPU tensors.
"""

import contextlib
import gc
import os
import sys
from unittest import mock

import torch

from aligner.config import LengthParams, SamplingParams
from aligner.device import accelerator
from aligner.distributed.workers import LocalFuture
from aligner.errors import DryDeviceError
from aligner.generation.vllm import worker as vllm_worker
from aligner.generation.vllm.settings import VllmConfig
from aligner.models.gpt.role.model import RoleModel
from aligner.models.worker import RoleWorker
from aligner.refit.controller import Refit, group_by_bytes
from aligner.refit.ends import RefitEnd
from aligner.refit.worker import RefitWorker
from aligner_plan.dry.device import DryDevice
from aligner_plan.dry.streams import Process

NAMES, SIZE = ["a", "b", "c"], 1024


class Weights(RefitWorker):
    def hf_weight_names(self):
        return NAMES

    def hf_weights(self, names):
        return ((name, torch.ones(SIZE, device="cuda")) for name in names)


class Engine:
    """In vLLM's place. Its methods run in the process and on the stream of an engine."""

    def __init__(self, device, process, loads):
        self._device, self._process, self._loads = device, process, loads
        self._kept, self._stream = {}, None

    def __getattr__(self, name):
        def call(weights=()):
            with self._device.entered(self._process):
                self._stream = self._stream or torch.cuda.Stream()
                with torch.cuda.stream(self._stream):
                    getattr(self, f"_{name}")(weights)

        return call

    def _begin_refit(self, _):
        self._kept.update((name, torch.zeros(SIZE, device="cuda")) for name in NAMES)

    def _load_weights(self, weights):
        for name, tensor in weights:
            self._kept[name].copy_(tensor)
            self._loads.append(name)

    def _finish_refit(self, _):
        for name in NAMES:
            self._kept[name].mul_(2)


class Called:
    """An object of another process, whose methods are called from this one."""

    def __init__(self, device, process, there):
        self._order, self._process, self._there = device.order, process, there

    def __getattr__(self, name):
        def call(*arguments, **options):
            with self._order.in_process(self._process):
                return getattr(self._there, name)(*arguments, **options)

        return call


class Source:
    def __init__(self, worker):
        self._worker = worker

    def prepare_weights_for_ipc(self, budget_gb):
        sizes, _ = self._worker.prepare_weights_for_ipc()
        return group_by_bytes(sizes, int(budget_gb * 1024**3))

    def __getattr__(self, name):
        return getattr(self._worker, name)


class Target:
    def __init__(self, worker):
        self._worker = worker

    def run_all_workers_single_data(self, method_name, **kwargs):
        return LocalFuture([getattr(self._worker, method_name)(**kwargs)])

    def get_all_worker_results(self, future):
        return future.get_results()


def engine_worker(device, process, loads):
    with (
        mock.patch.object(vllm_worker, "VllmEngine", return_value=Engine(device, process, loads)),
        device.order.in_process(process),
    ):
        arguments = vllm_worker.EngineArguments(
            architecture=None,
            precision="bf16",
            eos_ids=[0],
            length=LengthParams(),
            sampling=SamplingParams(),
            max_batch_size=1,
            max_sequence_length=8,
            settings=VllmConfig(),
        )
        ends = [RefitEnd.of_this_process("policy rank 0")]
        return vllm_worker.VllmWorker(arguments, tokenizer_files={}, pad_id=0, weights_from=ends)


def exports(readers):
    """What a policy worker offers to ``readers``, and the bytes that it holds for them.

    And those that stay when the offer is withdrawn, which nobody has opened.
    """
    with DryDevice() as device:
        policy = Weights()
        policy.prepare_refit_info()
        before = device.memory.alive_bytes
        handles = list(policy.get_weights_ipc_handles(["a", "b"], readers))
        held = device.memory.alive_bytes - before
        policy.offload_after_refit()
        gc.collect()
        return [handles, held, device.memory.alive_bytes - before]


def refit(without=None):
    """Two refits in groups of two weights; ``without``: a wait that is left out, by its place.

    Returns what the dry device says of it, what was loaded, the bytes that stay on the device, and
    how often the host waits.
    """
    loads, left = [], None
    with DryDevice() as device:
        engine, policy = Process("the engine"), Process("the policy")
        worker = engine_worker(device, engine, loads)
        push = Refit(
            Source(Called(device, policy, Weights())),
            Target(Called(device, engine, worker)),
            separate=False,
            buffer_bytes=2 * 4 * SIZE,
            world_size=1,
            timeout_s=1.0,
        )
        try:
            with leaving_out(without):
                push()
                kept = device.memory.alive_bytes
                with device.record() as record:
                    push()
                torch.ones(1, device="cuda")
                left = device.memory.alive_bytes - kept
        except DryDeviceError as error:
            return {"error": str(error)}
    return {"loads": loads, "left": left, "waits": dict(record.host_waits)}


class Broadcast:
    def send(self, tensor):
        tensor.fill_(1.0)


def received(without=None):
    with DryDevice() as device:
        engine = Process("the engine")
        worker = engine_worker(device, engine, [])
        worker._broadcast = Broadcast()
        there = Called(device, engine, worker)
        try:
            with leaving_out(without):
                there.begin_refit()
                there.receive_weights([(name, ((SIZE,), torch.float32)) for name in NAMES])
                there.finish_refit()
                torch.ones(1, device="cuda")
        except DryDeviceError as error:
            return str(error)
    return ""


@contextlib.contextmanager
def leaving_out(place):
    """Without the calls of `accelerator.synchronize` whose number in a function is ``place[1]``."""
    if place is None:
        yield
        return
    function, number, each = *place, [0]
    real = accelerator.synchronize

    def synchronize():
        if sys._getframe(1).f_code.co_name == function:
            each[0] += 1
            if (each[0] - 1) % 2 == number or function != "_synchronized":
                return
        real()

    with mock.patch.object(accelerator, "synchronize", synchronize):
        yield


class Trained(RoleModel):
    """A role that has no weights."""

    optimizer = None


Trained.__abstractmethods__ = frozenset()  # a phase calls none of them


def given_back(phase, shared):
    """How often a worker gives memory back at the end of ``phase``.

    ``shared``: others use its device.
    """
    with (
        DryDevice(),
        mock.patch.dict(os.environ, {accelerator.SHARED_DEVICE: str(int(shared))}),
        mock.patch.object(torch.cuda, "empty_cache") as release,
    ):
        getattr(RoleWorker(Trained(), None), f"finish_{phase}")()
    return release.call_count
