"""Fused log-probs against log-softmax-then-gather: peak memory and time, forward and backward.

    python -m benchmarks.logprob_memory

Every reading is a separate process, the two forms in turn. Memory is counted over the inputs
(hidden states and weight), so the gradients that both must return are part of it: `peak_MB` is the
peak of what the tensor allocator has handed out, `rss_MB` the growth of the process's peak resident
memory (which also holds the libraries' code and buffers, some 30 MB that come and go). Prints a
JSON line per reading and one with the ratios and verdicts per hidden size. Exits with 1 when a mark
is missed. Marks: memory at most 0.1. Time at most 1.25 at hidden size 576 and 1.0 at 64.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams

MARKS = {64: {"time": 1.0, "memory": 0.1}, 576: {"time": 1.25, "memory": 0.1}}


def gathered(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the plain form."""
    logits = hidden @ weight.t()
    return torch.log_softmax(logits, dim=-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    shard = VocabShard.of(weight, weight.shape[0], None)
    return hidden_states_to_logprobs(hidden, weight, target, shard, TrainingSamplingParams())[0]


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_allocated_mb(function: Callable[[], None]) -> float:
    """Measure the largest total of tensors that ``function`` allocates, in MB."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(itertools.accumulate(size for _, size in changes)) / 2**20


def measure(form: str, size: int, tokens: int, vocab: int, repeats: int) -> dict[str, object]:
    """Measure one form in this process: the median of its repeats after one warm-up."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(tokens, size).normal_(generator=generator).requires_grad_()
    weight = torch.empty(vocab, size).normal_(0, size**-0.5, generator=generator).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    upstream = torch.empty(tokens).normal_(generator=generator)
    function = {"fused": fused, "gathered": gathered}[form]
    # The libraries' own pages appear with the first product of any size. They are not counted.
    small = torch.ones(64, size, requires_grad=True)
    function(small[:8], small, target[:8] % 64).sum().backward()
    rss_before = rss_mb()

    def step() -> None:
        hidden.grad = weight.grad = None
        function(hidden, weight, target).backward(upstream)

    step()  # warm-up
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    rss = rss_mb() - rss_before  # before the profiler adds its own
    return {
        "form": form,
        "hidden": size,
        "tokens": tokens,
        "vocab": vocab,
        "threads": torch.get_num_threads(),
        "wall_s": round(statistics.median(wall), 3),
        "cpu_s": round(statistics.median(cpu), 3),
        "peak_MB": round(peak_allocated_mb(step), 1),
        "rss_MB": round(rss, 1),
    }


def verdicts(size: int, ratios: dict[str, float]) -> dict[str, str]:
    """Return each mark of this hidden size as kept or missed, with both numbers."""
    return {
        key: f"{'kept' if ratios[key] <= mark else 'MISSED'}: {ratios[key]} (at most {mark})"
        for key, mark in MARKS.get(size, {}).items()
    }


def compare(arguments: argparse.Namespace, size: int) -> bool:
    """Alternate the two forms, print the ratios of their medians. Whether every mark is kept."""
    readings: dict[str, list[dict[str, float]]] = {"fused": [], "gathered": []}
    for _ in range(arguments.rounds):
        for form, rows in readings.items():
            command = [sys.executable, "-m", "benchmarks.logprob_memory", "--form", form]
            for name in ("tokens", "vocab", "repeats", "threads"):
                command += [f"--{name}", str(getattr(arguments, name))]
            command += ["--hidden", str(size)]
            completed = subprocess.run(
                command, check=True, timeout=900, stdout=subprocess.PIPE, text=True
            )
            line = completed.stdout.strip().splitlines()[-1]
            print(line, flush=True)
            rows.append(json.loads(line))

    def ratio(key: str) -> float:
        fused_rows, gathered_rows = (
            [row[key] for row in readings[form]] for form in ("fused", "gathered")
        )
        return round(statistics.median(fused_rows) / statistics.median(gathered_rows), 4)

    judged = verdicts(size, {"time": ratio("wall_s"), "memory": ratio("peak_MB")})
    summary = {
        "benchmark": "logprob_memory",
        "hidden": size,
        "time_ratio": ratio("wall_s"),
        "cpu_time_ratio": ratio("cpu_s"),
        "memory_ratio": ratio("peak_MB"),
        "rss_ratio": ratio("rss_MB"),
        "verdicts": judged,
    }
    print(json.dumps(summary), flush=True)
    return not any(verdict.startswith("MISSED") for verdict in judged.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 576])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--form", choices=["fused", "gathered"], help="one reading, this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.form is None:
        results = [compare(arguments, size) for size in arguments.hidden]
        sys.exit(0 if all(results) else 1)
    for size in arguments.hidden:
        reading = measure(
            arguments.form, size, arguments.tokens, arguments.vocab, arguments.repeats
        )
        print(json.dumps(reading))


if __name__ == "__main__":
    main()
