"""Responses to shared prompts, trained and scored with each prompt once against once a row.

    python -m benchmarks.shared_prefix
    python -m benchmarks.shared_prefix --layers 6 --repeats 3

One policy of SmolLM2's shape with random weights, in one process, with ``model.shared_prefixes``
on and off in turn: a training pass (forward and backward of a global batch, no update) and the
log-probs of it, on ``--prompts`` prompts with ``--group`` responses each, and then on as many rows
that share nothing. The losses and log-probs of both must agree. Prints one JSON line. ``train`` and
``score`` are seconds shared over unshared, the median over alternating pairs. ``train_peak`` and
``score_peak`` the same of bytes allocated beyond what was there before (counted in torch's
allocator, `allocations.cpp`, needs a C++ compiler). Marks: 0.40, 0.40 and 0.45. Where nothing is
shared at most 1.03.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalWorkerGroup
from aligner.examples.tasks.tiny_model import random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.policy.lm_policy import Policy
from benchmarks.common import log
from benchmarks.plan import counting_allocator
from benchmarks.policies import make_policy, run
from benchmarks.shapes import SMOLLM2

MARKS = {"train": 0.40, "score": 0.40, "train_peak": 0.45, "nothing_shared": 1.03}
KINDS = ("shared", "nothing_shared")
TOLERANCE = 1e-5


def make_batch(options: argparse.Namespace, shared: bool) -> BatchedDataDict:
    """Return a rollout of random tokens. ``shared``: the rows of a group share one prompt."""
    generator = torch.Generator().manual_seed(0)
    rows, width = options.prompts * options.group, options.prompt + options.response
    ids = torch.randint(0, SMOLLM2.vocab_size, (rows, width), generator=generator)
    if shared:
        prompts = ids[:: options.group, : options.prompt]
        ids[:, : options.prompt] = prompts.repeat_interleave(options.group, 0)
    mask = (torch.arange(width) >= options.prompt).float().expand(rows, width)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((rows,), width),
            "token_mask": mask.clone(),
            "sample_mask": torch.ones(rows),
            "advantages": torch.randn(rows, width, generator=generator),
            "prev_logprobs": torch.full((rows, width), -10.8),
        }
    )


def role_of(policy: Policy) -> Any:
    """Return the model in this process."""
    assert isinstance(policy.worker_group, LocalWorkerGroup)
    return policy.worker_group.worker.model


def train(policy: Policy, batch: BatchedDataDict) -> Tensor:
    """Run forward and backward of a global batch and return the loss, [1]."""
    role = role_of(policy)
    role.optimizer.zero_grad()
    loss, _ = role.get_loss_and_metrics(batch, False, PPOPolicyLoss())
    return torch.tensor([loss])


def score(policy: Policy, batch: BatchedDataDict) -> Tensor:
    """Compute log-probs, [B, S], in micro-batches of the same size."""
    role = role_of(policy)
    return role.get_logprobs(batch, role.settings.micro_batch_size)


Work = Callable[[Policy, BatchedDataDict], Tensor]


def reading(work: Work, policy: Policy, batch: BatchedDataDict, memory: Any) -> dict[str, Any]:
    """Measure seconds, peak bytes above the initial bytes, and the result."""
    bytes_before = memory.alive_bytes()
    memory.take_peak_bytes()
    start = time.perf_counter()
    result = work(policy, batch)
    seconds = time.perf_counter() - start
    return {"s": seconds, "bytes": memory.take_peak_bytes() - bytes_before, "result": result}


def compared(
    policies: tuple[Policy, Policy], work: Work, batch: BatchedDataDict, repeats: int, memory: Any
) -> dict[str, float]:
    """Alternate shared and unshared. The first pair of a kind warms up on one group."""
    pairs = [[reading(work, policy, batch, memory) for policy in policies] for _ in range(repeats)]
    for shared_run, unshared_run in pairs:
        gap = (shared_run["result"] - unshared_run["result"]).abs().max().item()
        assert gap < TOLERANCE * max(1.0, unshared_run["result"].abs().max().item()), gap
    return {
        "ratio": round(
            statistics.median(
                shared_run["s"] / unshared_run["s"] for shared_run, unshared_run in pairs
            ),
            3,
        ),
        "peak": round(statistics.median(a["bytes"] / b["bytes"] for a, b in pairs), 3),
        "shared_s": round(statistics.median(shared_run["s"] for shared_run, _ in pairs), 2),
        "unshared_s": round(statistics.median(unshared_run["s"] for _, unshared_run in pairs), 2),
        "shared_peak_MB": round(max(shared_run["bytes"] for shared_run, _ in pairs) / 2**20, 1),
        "unshared_peak_MB": round(
            max(unshared_run["bytes"] for _, unshared_run in pairs) / 2**20, 1
        ),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both kinds of work on both kinds of batches."""
    memory = counting_allocator()
    architecture = dataclasses.replace(SMOLLM2, num_layers=options.layers)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.nemo"
        save_nemo(model, random_weights(architecture), architecture, {})
        rows = {
            "micro_batch_size": options.micro_batch,
            "global_batch_size": options.prompts * options.group,
        }
        policies = (
            make_policy(model, shared_prefixes=True, **rows),
            make_policy(model, shared_prefixes=False, **rows),
        )
    results: dict[str, Any] = {}
    for kind in options.kinds:
        batch = make_batch(options, kind == "shared")
        few = batch.slice(0, options.micro_batch)
        for work in (train, score):
            for policy in policies:
                work(policy, few)
            compare = compared(policies, work, batch, options.repeats, memory)
            results[f"{kind}_{work.__name__}"] = compare
            log(f"{kind} {work.__name__}: {compare}")
    return {
        "benchmark": "shared_prefix",
        **{name: getattr(options, name) for name in (
            "layers", "prompts", "group", "prompt", "response", "micro_batch", "repeats"
        )},
        "threads": torch.get_num_threads(),
        **summary(results),
        "readings": results,
    }  # fmt: skip


def summary(results: dict[str, Any]) -> dict[str, float]:
    """Return the measured numbers of the marks."""
    numbers = {}
    if "shared_train" in results:
        for work in ("train", "score"):
            numbers[work] = results[f"shared_{work}"]["ratio"]
            numbers[f"{work}_peak"] = results[f"shared_{work}"]["peak"]
    if "nothing_shared_train" in results:
        ratios = (results[f"nothing_shared_{work}"]["ratio"] for work in ("train", "score"))
        numbers["nothing_shared"] = max(ratios)
    return numbers


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=SMOLLM2.num_layers)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of batches")
    result = run(parser, measure, micro_batch=8, repeats=1)
    missed = [f"{name} {result[name]} > {mark}" for name, mark in MARKS.items()
              if result.get(name, 0.0) > mark]  # fmt: skip
    log(f"marks: {'MISSED: ' + ', '.join(missed) if missed else 'all kept'}")


if __name__ == "__main__":
    main()
