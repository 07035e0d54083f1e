"""GAE and whitening on [512, 1024] against verl's, on the same inputs in one process.

    python -m benchmarks.gae

verl is installed into `.venv-bench-verl` on the first run, without its dependencies, and is seen by
the measuring subprocess only. Prints one JSON line. `ratio` is aligner's time over verl's, the
median over alternating pairs. Mark: at most 0.2. One thread by default: verl's loop of small
operations uses no more, and two would measure how busy the machine is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from aligner.losses.advantages import generalized_advantage_estimate
from aligner.losses.masked import masked_whiten

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".venv-bench-verl"
# verl and what importing its core_algos needs beyond our own requirements.
PEER_PACKAGES = ["verl==0.9.1", "tensordict==0.15.3", "pyvers", "codetiming", "orjson"]
GAMMA, LAM = 0.99, 0.95


def make_peer() -> None:
    """Install the peer once."""
    if (PEER / "verl").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(PEER), *PEER_PACKAGES], check=True, timeout=600)


def make_inputs(batch: int, length: int, holes: bool) -> tuple[torch.Tensor, ...]:
    """Return values, rewards, mask: prompts of up to 64 tokens, responses of varying length."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(batch, length, generator=generator)
    rewards = 0.1 * torch.randn(batch, length, generator=generator)
    position = torch.arange(length)
    end = torch.randint(length // 4, length + 1, (batch, 1), generator=generator)
    mask = (position >= min(64, length // 8)) & (position < end)
    if holes:
        mask &= torch.rand(batch, length, generator=generator) < 0.8
    return values, rewards, mask.float()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(batch: int, length: int, repeats: int, holes: bool) -> dict[str, object]:
    """Time both in turn. The results must agree."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    values, rewards, mask = make_inputs(batch, length, holes)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        advantages, returns = generalized_advantage_estimate(values, rewards, mask, GAMMA, LAM)
        return masked_whiten(advantages, mask), returns

    def peer() -> tuple[torch.Tensor, torch.Tensor]:
        return compute_gae_advantage_return(rewards, values, mask, GAMMA, LAM)

    generated = mask.bool()
    difference = max(
        (a - b)[generated].abs().max().item() for a, b in zip(ours(), peer(), strict=True)
    )
    assert difference < 1e-4, f"aligner and verl disagree by {difference}"
    pairs = [(seconds(ours), seconds(peer)) for _ in range(repeats)]
    return {
        "benchmark": "gae",
        "batch": batch,
        "length": length,
        "holes": holes,
        "threads": torch.get_num_threads(),
        "aligner_ms": round(1e3 * statistics.median(a for a, _ in pairs), 2),
        "verl_ms": round(1e3 * statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 4),
        "mark": 0.2,
        "max_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--holes", action="store_true", help="multi-turn masks")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(arguments.threads)
        result = measure(arguments.batch, arguments.length, arguments.repeats, arguments.holes)
        print(json.dumps(result))
        return
    make_peer()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{PEER}"}
    command = [sys.executable, "-m", "benchmarks.gae", "--measure", *sys.argv[1:]]
    completed = subprocess.run(
        command, check=True, timeout=600, env=environment, stdout=subprocess.PIPE, text=True
    )
    print(completed.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
