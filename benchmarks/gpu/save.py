"""A run state of one role to disk and back: seconds and bytes per second.

    python -m benchmarks.gpu.save --folder /somewhere/with/space

An actor's float32 weights and moments, 12 bytes a parameter, as a run saves them. ``wait_s`` is
what training waits while the rest is written in the background, ``written_s`` until all is on disk.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.worker import RoleWorker
from benchmarks.gpu import roles
from benchmarks.shapes import SHAPES

_TOKENS = 16


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    shape = SHAPES[options.shape]
    plan = machine.planned_amounts(options, "save")
    with machine.Machine(options).running() as bench:
        role = roles.build(MegatronGPTActorModel, shape, micro_batch_size=1)
        role.loss_fn = PPOPolicyLoss(needs_entropy=False)
        role.prepare_for_training()
        role.training_update(roles.batch(1, _TOKENS, 1, shape.vocab_size))
        worker = RoleWorker(role, role.parallel)
        slices = worker.state_dict()["slices"].values()
        size = sum(tensor.nbytes for piece in slices for tensor in piece["tensors"].values())
        if bench.device == "dry":  # its tensors have nothing to write
            return machine.report(options, "save", bytes=size, next={"plan": plan["save"]})
        parent = Path(options.folder) if options.folder else None
        folder = Path(tempfile.mkdtemp(dir=parent))
        target = str(folder / "policy")
        result: dict[str, dict[str, float]] = {}
        try:
            for name in ("first", "next"):  # the first one allocates the copy
                start = time.perf_counter()
                worker.begin_saving(target, in_background=True)
                wait = time.perf_counter() - start
                failure = worker.saving_failure(wait=True)
                assert failure is None, failure
                written = time.perf_counter() - start
                result[name] = {"wait_s": wait, "written_s": written, "bytes_per_s": size / written}
            result["in_place"] = bench.measure(lambda: save_worker_state(worker, target))
            result["load"] = bench.measure(lambda: worker.load_state(target))
        finally:
            shutil.rmtree(folder)
        for name in ("in_place", "load"):
            result[name]["bytes_per_s"] = size / result[name]["seconds"]
        return machine.report(options, "save", bytes=size, **result)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.set_defaults(repeats=1, warmup=0)
    parser.add_argument("--folder", help="where to write; default the system's for temporary files")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
