"""One rank of `test_model_utils_tp`: every function against the whole vocabulary in float64.

    torchrun --nproc-per-node N model_utils_worker.py OUTPUT TP,CP [TP,CP ...]

All ranks draw the same inputs from seeded generators, so that each can hold its part against the
whole. A case that fails is noted and the others go on; rank 0 writes ``{layout: {case: failure or
None}}``.
"""

import datetime
import json
import sys
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)

import torch.distributed as dist
from model_utils_case import DTYPES, Case, Layout
from model_utils_frame_cases import (
    chosen_logits,
    context,
    distillation,
    dtensors,
    frames,
    hidden_frames,
    packed,
)
from model_utils_vocab_cases import (
    cross_entropies,
    entropies,
    exchanges,
    fused,
    gathers,
    logprobs,
    padded_columns,
    sampling,
    softmaxes,
    topk,
)

SHAPES = 4  # the last of one position
CASES = [
    softmaxes, logprobs, padded_columns, sampling, gathers, entropies, cross_entropies, exchanges,
    topk, fused, frames, packed, hidden_frames, context, chosen_logits, distillation, dtensors,
]  # fmt: skip


def run(layout):
    """Failure or None of each case, of the first rank that has one."""
    outcome = {}
    for function in CASES:
        failure = None
        try:
            for seed in range(SHAPES):
                dtype = list(DTYPES)[seed % len(DTYPES)]
                function(Case(layout, seed, dtype, one_position=seed == 3))
        except Exception:
            failure = f"rank {dist.get_rank()}, seed {seed}, {dtype}: {traceback.format_exc()}"
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        outcome[function.__name__] = next(filter(None, failures), None)
    return outcome


def main():
    output, *layouts = sys.argv[1:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    outcome = {}
    for layout in layouts:
        tp, cp = (int(size) for size in layout.split(","))
        outcome[layout] = run(Layout(tp, cp))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
