"""A policy's weights to another process on the same device, as a refit hands them over.

    python -m benchmarks.gpu.refit

Groups of at most ``--buffer-mb`` of whole tensors under Hugging Face's names are offered. The other
process opens each, copies it into separate memory and answers. ``level_bytes`` is what the
device has less of after the refits than after the first. Aim: 1 s for 1.5B on one H200.
"""

import argparse
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

from aligner.config import ModelConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.policy.workers.megatron_policy_worker import MegatronPolicyWorker
from aligner.parallel.groups import initialize_parallel
from aligner.refit.controller import group_by_bytes
from benchmarks.common import ROOT, with_repository
from benchmarks.gpu import roles
from benchmarks.shapes import SHAPES

RECEIVER = """
    import pickle, sys
    from aligner.device import accelerator
    from aligner.refit.segments import accept

    accelerator.activate()
    own = {}
    while (handles := pickle.load(sys.stdin.buffer)) is not None:
        for name, tensor in accept(handles):
            if name not in own:
                own[name] = tensor.clone()
            else:
                own[name].copy_(tensor)
        del tensor
        accelerator.synchronize()
        pickle.dump(len(own), sys.stdout.buffer)
        sys.stdout.flush()
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    shape = SHAPES[options.shape]
    plan = machine.planned_amounts(options, "refit", buffer_bytes=options.buffer_mb << 20)

    class RandomPolicyWorker(MegatronPolicyWorker):
        """Its policy is not read from a file."""

        @staticmethod
        def load_model(*_: Any) -> MegatronGPTActorModel:
            return roles.build(MegatronGPTActorModel, shape, optim=None)

    with machine.Machine(options).running() as bench:
        config = ModelConfig(restore_from_path="random")
        worker = RandomPolicyWorker(
            config,
            byte_level_tokenizer(),
            parallel=initialize_parallel(config.parallel),
            init_optimizer=False,
            init_reference_model=False,
        )
        sizes, _ = worker.prepare_weights_for_ipc()
        groups = group_by_bytes(sizes, options.buffer_mb << 20)
        size = sum(nbytes for _, nbytes in sizes)
        fields = {"bytes": size, "groups": len(groups), "tensors": len(sizes)}
        if bench.device == "dry":  # there is no other process to open what it offers

            def gather() -> None:
                for keys in groups:
                    copies = [tensor.clone() for _, tensor in worker.hf_weights(keys)]
                    del copies

            gathered, refit_plan = bench.measure(gather), {"plan": plan["refit"]}
            return machine.report(options, "refit", **fields, gather=gathered, refit=refit_plan)
        receiver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RECEIVER)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_repository(),
        )
        to_it, from_it = receiver.stdin, receiver.stdout
        assert to_it is not None
        assert from_it is not None
        try:

            def refit() -> None:
                worker.offload_before_refit()
                for keys in groups:
                    pickle.dump(worker.get_weights_ipc_handles(keys), to_it)
                    to_it.flush()
                    pickle.load(from_it)
                worker.offload_after_refit()

            refit()
            bytes_before = accelerator.free_memory_bytes()
            cost = bench.measure(refit)
            level = bytes_before - accelerator.free_memory_bytes()
            pickle.dump(None, to_it)
            to_it.flush()
            receiver.wait(60)
        finally:
            receiver.kill()
            receiver.wait()
        rate = size / cost["seconds"]
        return machine.report(
            options, "refit", **fields, refit=cost, bytes_per_s=rate, level_bytes=level
        )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.add_argument("--buffer-mb", type=int, default=512, help="MiB of a group")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
