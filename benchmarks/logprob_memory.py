"""Fused log-probs against log-softmax-then-gather: peak memory and time, forward and backward.

    python -m benchmarks.logprob_memory

Every reading is a process of its own, the two forms in turn. `peak_MB` is the growth of the
process's peak resident memory over the inputs (hidden states and weight), so the gradients that
both must return are counted. Prints a JSON line per reading and one with the ratios per hidden
size. Marks: memory at most 0.1; time at most 1.25 at hidden size 576 and 1.0 at 64.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

from aligner.distributed.model_utils import hidden_states_to_logprobs

MARKS = {64: {"time": 1.0, "memory": 0.1}, 576: {"time": 1.25, "memory": 0.1}}


def gathered(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The plain form."""
    logits = hidden @ weight.t()
    return torch.log_softmax(logits, dim=-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return hidden_states_to_logprobs(hidden, weight, target, vocab_size=weight.shape[0])[0]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: str, size: int, tokens: int, vocab: int, repeats: int) -> dict[str, object]:
    """One form in this process: the median of its repeats after one warm-up."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(tokens, size).normal_(generator=generator).requires_grad_()
    weight = torch.empty(vocab, size).normal_(0, size**-0.5, generator=generator).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    upstream = torch.empty(tokens).normal_(generator=generator)
    function = {"fused": fused, "gathered": gathered}[form]
    before = peak_mb()
    wall, cpu = [], []
    for _ in range(repeats + 1):
        hidden.grad = weight.grad = None
        start, start_cpu = time.perf_counter(), time.process_time()
        logprobs = function(hidden, weight, target)
        logprobs.backward(upstream)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return {
        "form": form,
        "hidden": size,
        "tokens": tokens,
        "vocab": vocab,
        "threads": torch.get_num_threads(),
        "wall_s": round(statistics.median(wall[1:]), 3),
        "cpu_s": round(statistics.median(cpu[1:]), 3),
        "peak_MB": round(peak_mb() - before, 1),
        "logprob_sum": round(logprobs.sum().item(), 2),
    }


def compare(arguments: argparse.Namespace, size: int) -> None:
    """Alternate the two forms and print the ratios of their medians."""
    readings: dict[str, list[dict[str, float]]] = {"fused": [], "gathered": []}
    for _ in range(arguments.rounds):
        for form, rows in readings.items():
            command = [sys.executable, "-m", "benchmarks.logprob_memory", "--form", form]
            for name in ("tokens", "vocab", "repeats", "threads"):
                command += [f"--{name}", str(getattr(arguments, name))]
            command += ["--hidden", str(size)]
            done = subprocess.run(
                command, check=True, timeout=900, stdout=subprocess.PIPE, text=True
            )
            print(done.stdout.strip(), flush=True)
            rows.append(json.loads(done.stdout))

    def ratio(key: str) -> float:
        fused_rows, gathered_rows = (
            [row[key] for row in readings[form]] for form in ("fused", "gathered")
        )
        return round(statistics.median(fused_rows) / statistics.median(gathered_rows), 4)

    print(
        json.dumps(
            {
                "benchmark": "logprob_memory",
                "hidden": size,
                "time_ratio": ratio("wall_s"),
                "cpu_time_ratio": ratio("cpu_s"),
                "memory_ratio": ratio("peak_MB"),
                "marks": MARKS.get(size),
            }
        ),
        flush=True,
    )


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
    for size in arguments.hidden:
        if arguments.form is None:
            compare(arguments, size)
        else:
            reading = measure(
                arguments.form, size, arguments.tokens, arguments.vocab, arguments.repeats
            )
            print(json.dumps(reading))


if __name__ == "__main__":
    main()
