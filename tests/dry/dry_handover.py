"""Cases of `test_dry_handover`.

What needs a driver is replaced here: exporting memory to another process, and vLLM. The rest is the
library's own code on fake GPU tensors.
"""

import contextlib
import os
from unittest import mock

import torch

from aligner.config import LengthParams, SamplingParams, VllmConfig
from aligner.distributed import accelerator
from aligner.distributed.refit_ends import RefitEnd
from aligner.dry.device import DryDevice
from aligner.models.generation import vllm_worker
from aligner.models.policy.workers.refit_worker import RefitWorker
from aligner.models.role_worker import RoleWorker

HERE = "GPU here"


class Weights(RefitWorker):
    """A worker with two weights."""

    def hf_weight_names(self):
        return ["a", "b"]

    def hf_weights(self, names):
        return ((name, torch.ones(1024, device="cuda")) for name in names)


class Engine:
    """In vLLM's place: writes down what is asked of it."""

    log: list = []  # noqa: RUF012 - one log, as there is one device

    def __init__(self, *_, **__):
        pass

    def begin_refit(self):
        self.log.append("begin")

    def load_weights(self, weights):
        assert all(tensor.is_cuda for _, tensor in weights)
        self.log.append("load")

    def finish_refit(self):
        self.log.append("finish")


class Trained:
    """A role that has nothing to do when training ends, as the real ones."""

    def finish_training(self):
        pass


@contextlib.contextmanager
def one_gpu():
    """The dry device, with a log of what the host waits for and gives back."""
    with (
        DryDevice() as device,
        mock.patch.multiple(
            accelerator,
            sharing_key=lambda: HERE,
            nccl_version=lambda: (2, 29, 3),
            export_tensor=lambda tensor: tensor,
            import_tensor=lambda tensor: tensor,
        ),
        mock.patch.multiple(
            torch.cuda,
            synchronize=lambda *_: Engine.log.append("synchronize"),
            empty_cache=lambda: Engine.log.append("release"),
        ),
        mock.patch.object(vllm_worker, "VllmEngine", Engine),
    ):
        yield device


def exports(readers):
    """What a policy worker offers to ``readers``, and the bytes that it holds for them."""
    with one_gpu() as device:
        policy = Weights()
        policy.prepare_refit_info()
        before = device.memory.alive_bytes
        handles = policy.get_weights_ipc_handles(["a", "b"], readers)
        return [list(handles), device.memory.alive_bytes - before]


def order():
    """What happens on the device in a refit, one after the other."""
    with one_gpu():
        engine = vllm_worker.VllmWorker(
            architecture=None,
            tokenizer_files={},
            eos_ids=[0],
            pad_id=0,
            precision="bf16",
            length=LengthParams(),
            sampling=SamplingParams(),
            max_batch_size=1,
            max_sequence_length=8,
            settings=VllmConfig(),
            weights_from=[RefitEnd.here("policy rank 0")],
        )
        engine.begin_refit()
        engine.load_weights_from_ipc(Weights().get_weights_ipc_handles(["a"], [HERE]))
        engine.finish_refit()
        return Engine.log


def after_training(shared):
    """What a worker gives back when it leaves training; ``shared``: others use its device."""
    with one_gpu(), mock.patch.dict(os.environ, {accelerator.SHARED_DEVICE: str(int(shared))}):
        RoleWorker(Trained(), None).finish_training()
        return Engine.log
