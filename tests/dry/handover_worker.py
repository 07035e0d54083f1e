"""One process for what `test_dry_handover` asks of the dry device: `python handover_worker.py OUT`.

What needs a driver is replaced here: exporting memory to another process, and vLLM. The rest is the
library's own code on fake GPU tensors.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

from aligner.dry.guard import load_guard

load_guard()

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


def exports(device):
    """Bytes that a policy worker holds for others, by who is going to open them."""
    policy, found = Weights(), {}
    policy.prepare_refit_info()
    for name, readers in {"nobody": [], "elsewhere": ["GPU elsewhere"], "here": [HERE]}.items():
        before = device.memory.alive_bytes
        handles = policy.get_weights_ipc_handles(["a", "b"], readers)
        found[name] = [list(handles), device.memory.alive_bytes - before]
        policy.offload_after_refit()
    return found


def order():
    """What happens on the device in a refit, one after the other."""
    Engine.log.clear()
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
    policy = Weights()
    engine.begin_refit()
    engine.load_weights_from_ipc(policy.get_weights_ipc_handles(["a"], [HERE]))
    engine.finish_refit()
    return list(Engine.log)


def after_training():
    """What a worker gives back when it leaves training, alone on its device and not."""
    worker, found = RoleWorker(Trained(), None), {}
    for shared in ("0", "1"):
        Engine.log.clear()
        with mock.patch.dict(os.environ, {accelerator.SHARED_DEVICE: shared}):
            worker.finish_training()
        found[shared] = list(Engine.log)
    return found


def main():
    """Everything, into the file."""
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
        found = {"exports": exports(device), "order": order(), "after_training": after_training()}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
