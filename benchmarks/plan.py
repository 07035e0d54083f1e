"""Estimates of `plan` for an update, against the same update on this machine.

    python -m benchmarks.plan
    python -m benchmarks.plan --models tiny --layouts one --batches padded

For every model, layout and way to form micro-batches there is one process that predicts, on the dry
device in the place of a CPU, from two short runs of few layers. And the processes of the layout,
which make the update with random weights. Compared are, on rank 0: bytes alive between updates and
at the peak of one (counted in torch's allocator, from before the process takes its place in the
layout), floating-point operations (torch's counter) and bytes that collectives were given (their
calls, as they reach torch). Prints a JSON line per case. Exits with 1 when a mark is missed. Marks:
static 0.1 %, peak 10 %, operations and bytes of collectives equal. Needs a C++ compiler.
"""

import argparse
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.shapes import SMOLLM2

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"trainer.devices": 1},
    "data2": {"trainer.devices": 2},
    "tensor2": {
        "trainer.devices": 2,
        "model.tensor_model_parallel_size": 2,
        "model.sequence_parallel": True,
    },
}
MODELS = ("tiny", "smollm2")
BATCHES = ("padded", "packed")
LENGTH, MICRO_BATCH, MICRO_BATCHES = 128, 2, 3  # tokens, rows, of a rank
MARKS = {"static_bytes": 0.001, "peak_bytes": 0.10, "flops": 0.0, "wire_bytes": 0.0}


def planned(model: str, layout: str, batches: str) -> Any:
    """Return the role of a fine-tuning run, a `PlannedRole`, and its updates, a `Phase`."""
    from aligner.config.load import parse_config
    from aligner.config.run import SFTRunConfig
    from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
    from aligner_plan.options import PlanConfig, varied
    from aligner_plan.rehearsal import planned_run

    smollm2 = SMOLLM2
    if layout == "tensor2":  # 9 heads in 3 groups cannot be cut in two
        smollm2 = dataclasses.replace(SMOLLM2, num_attention_heads=8, num_query_groups=4)
    shapes = {"tiny": TINY_ARCHITECTURE, "smollm2": smollm2}
    data_size = 2 if layout == "data2" else 1
    config = varied(
        parse_config(
            {"model": {"restore_from_path": model}, "data": {"train": {"source": "none.jsonl"}}},
            SFTRunConfig,
        ),
        {
            **LAYOUTS[layout],
            "model.micro_batch_size": MICRO_BATCH,
            "model.global_batch_size": MICRO_BATCH * MICRO_BATCHES * data_size,
            "model.sequence_packing.enabled": batches == "packed",
            "model.sequence_packing.train_mb_tokens": MICRO_BATCH * LENGTH,
        },
    )
    role = planned_run(config, PlanConfig(length=LENGTH), shapes).roles["policy"]
    (train,) = (phase for phase in role.phases if phase.is_update)
    return role, train


def predicted(model: str, layout: str, batches: str) -> dict[str, float]:
    """Return the numbers of `aligner_plan`."""
    from aligner_plan.dry.guard import load_guard

    load_guard()
    from aligner_plan.amounts import total
    from aligner_plan.measure import measure

    role, train = planned(model, layout, batches)
    result = measure(dataclasses.replace(role, phases=(train,)), 0, "cpu")
    phase = result.phases["train"]
    return {
        "static_bytes": total(phase.remaining),
        "peak_bytes": total(phase.peaks[phase.peak_at]),
        "flops": sum(phase.amounts.flops.values()),
        "wire_bytes": sum(size for key, size in phase.amounts.wires.items() if key.group_size > 1),
    }


def measured(model: str, layout: str, batches: str) -> dict[str, float]:
    """Measure the update itself, in one of its processes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    from aligner_plan.measure import call_worker, start_worker, without_weights

    role, train = planned(model, layout, batches)
    memory = counting_allocator()
    with without_weights(role.architecture, role, initialize=True):
        worker = start_worker(role)
    worker.prepare_for_training()

    def update() -> None:
        call_worker(worker, role, train, role.rows(train))

    update()  # makes the moments, and tables of this length
    collect_garbage()
    static = memory.alive_bytes()
    memory.take_peak_bytes()
    update()
    peak = memory.take_peak_bytes()
    aten = torch.ops.aten
    in_place = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # left out of its table
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            op: formula(flop_registry[flop_name]) for op, flop_name in in_place.items()
        },
    )
    collectives = collective_counter()
    with counter, collectives:
        update()
    return {
        "static_bytes": static,
        "peak_bytes": peak,
        "flops": counter.get_total_flops(),
        "wire_bytes": sum(collectives.sizes.values()),
    }


def formula(registered: Any) -> Any:
    """Return a formula of torch's table that accepts additional arguments."""

    def count(*args: Any, **kwargs: Any) -> int:
        return int(registered(*args, **kwargs))

    count._get_raw = True  # type: ignore[attr-defined]
    return count


def counting_allocator() -> Any:
    """Count what torch's allocator gives out from now on: `allocations.cpp`."""
    from aligner.device.native import compiled

    source = Path(__file__).with_name("allocations.cpp")
    library = ctypes.CDLL(str(compiled(source)))
    library.alive_bytes.restype = library.take_peak_bytes.restype = ctypes.c_int64
    library.count()
    return library


def collect_garbage() -> None:
    """Wait until unused memory is freed: gloo's threads release it a little after their waiters."""
    gc.collect()
    time.sleep(1.0)


def collective_counter() -> Any:
    """Return a dispatch mode that records the calls of collectives between processes."""
    import torch.distributed as dist
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Collectives(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                names = (argument.name for argument in func._schema.arguments)
                call_arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
                group = dist.ProcessGroup.unbox(call_arguments["process_group"])
                if group.size() > 1:
                    self.sizes[func.overloadpacket.__name__] += max(
                        sum(t.nbytes for t in tree_leaves(argument) if isinstance(t, Tensor))
                        for argument in args
                    )
            return func(*args, **(kwargs or {}))

    return Collectives()


def run_case(model: str, layout: str, batches: str) -> dict[str, Any]:
    """Run both sides and compare them."""
    case = [model, layout, batches]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    word = [sys.executable, "-m", "benchmarks.plan", "--side"]

    def start(side: str, extra: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*word, side, *case],
            cwd=ROOT,
            env={**environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("PLAN_DEBUG") else None,
            text=True,
        )

    def answer(process: subprocess.Popen[str]) -> dict[str, float]:
        text, _ = process.communicate(timeout=1800)
        if process.returncode:
            raise SystemExit(f"{' '.join(case)}: a side ended with {process.returncode}")
        return json.loads(text.splitlines()[-1])

    prediction = answer(start("predicted", {}))
    world = LAYOUTS[layout]["trainer.devices"]
    with socket.socket() as holder:  # bound and not listening: rank 0's store may, nobody else
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
        rank_variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        ranks = [
            start(
                "measured",
                {**rank_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {},
            )
            for rank in range(world)
        ]
        reading, *_ = [answer(process) for process in ranks]
    off = {name: abs(prediction[name] - reading[name]) / max(1.0, reading[name]) for name in MARKS}
    return {
        "model": model,
        "layout": layout,
        "batches": batches,
        "predicted": prediction,
        "measured": reading,
        "off": off,
        "holds": all(off[name] <= max(mark, 1e-9) for name, mark in MARKS.items()),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=tuple(LAYOUTS), choices=tuple(LAYOUTS))
    parser.add_argument("--batches", nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        side, *case = arguments.side
        print(json.dumps({"predicted": predicted, "measured": measured}[side](*case)))
        return
    missed = False
    for case in itertools.product(arguments.models, arguments.layouts, arguments.batches):
        result = run_case(*case)
        missed |= not result["holds"]
        print(json.dumps(result), flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
