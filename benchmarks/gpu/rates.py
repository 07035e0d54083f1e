"""Rates of the card by itself: products at the model's shapes, copies, launches, allocations.

    python -m benchmarks.gpu.rates

These are the numbers that estimates of time are made from.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import machine
from benchmarks.shapes import SHAPES

if __name__ == "__main__":
    machine.choose_device()

import torch

from aligner.device import accelerator

# Dense bfloat16 TFLOP/s and bytes of memory per second of the makers' data sheets, by name.
CARDS = {
    "B200": (2250.0, 8.0e12),
    "H200": (989.0, 4.8e12),
    "H100": (989.0, 3.35e12),
    "A100": (312.0, 2.0e12),
    "L40S": (362.0, 0.86e12),
}
_LAUNCHES = 1000


def data_sheet() -> tuple[float, float] | None:
    """Return TFLOP/s and bytes/s of this card, or None if unknown."""
    name = accelerator.description()
    return next((card for key, card in CARDS.items() if key in name), None)


def share_of_peak(flops_per_s: float) -> float | None:
    """Return the share of the card's dense bfloat16 peak, or None if unknown."""
    card = data_sheet()
    return None if card is None else flops_per_s / (card[0] * 1e12)


def products(shape: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of a layer's products and of one tile of the output layer."""
    width = shape.num_attention_heads * shape.kv_channels
    both = width + 2 * shape.num_query_groups * shape.kv_channels
    return {
        "qkv": (shape.hidden_size, both),
        "proj": (width, shape.hidden_size),
        "fc1": (shape.hidden_size, 2 * shape.ffn_hidden_size),
        "fc2": (shape.ffn_hidden_size, shape.hidden_size),
        "head": (shape.hidden_size, min(8192, shape.vocab_size)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    with machine.Machine(options).running() as bench:
        device = accelerator.device()
        rates: dict[str, Any] = {"tflops": {}}
        kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
            "bfloat16": (torch.bfloat16, {}),
            "float32": (torch.float32, {}),
        }
        if bench.device != "cpu":  # bfloat16 in, float32 out
            kinds["bfloat16 to float32"] = (torch.bfloat16, {"out_dtype": torch.float32})
        for kind, (dtype, how) in kinds.items():
            for name, (inputs, outputs) in products(SHAPES[options.shape]).items():
                # Random numbers: a card draws more power for them than for ones, and is slower.
                lhs = torch.randn(options.tokens, inputs, dtype=dtype, device=device)
                right = torch.randn(inputs, outputs, dtype=dtype, device=device)

                def multiply(lhs: Any = lhs, right: Any = right, how: Any = how) -> None:
                    torch.mm(lhs, right, **how)

                cost = bench.measure(multiply)
                if "seconds" in cost:
                    flops = 2.0 * options.tokens * inputs * outputs
                    rates["tflops"].setdefault(kind, {})[name] = flops / cost["seconds"] / 1e12
        if bench.device == "dry":
            return machine.report(options, "rates", **rates)
        rates["bytes_per_s"] = _copies(bench, options.copied_mb << 20)
        rates.update(_small_costs(bench))
        return machine.report(options, "rates", **rates)


def _copies(bench: machine.Machine, size: int) -> dict[str, float]:
    """Measure copies on the device (read and written counted), to and from pinned host memory."""
    pinned = bench.device == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    from_tensor, to_tensor = (
        torch.empty(size, dtype=torch.uint8, device=accelerator.device()) for _ in "ab"
    )
    ways = {
        "on_device": (to_tensor, from_tensor),
        "to_device": (from_tensor, host),
        "to_host": (host, from_tensor),
    }
    rates = {}
    for name, (target, source) in ways.items():

        def copy(target: Any = target, source: Any = source) -> None:
            target.copy_(source, non_blocking=True)

        rates[name] = (2 if name == "on_device" else 1) * size / bench.measure(copy)["seconds"]
    return rates


def _small_costs(bench: machine.Machine) -> dict[str, float]:
    """Measure one launch, one read of a number, and one new allocation, in seconds."""
    scalar = torch.zeros(1, device=accelerator.device())

    def launch() -> None:
        for _ in range(_LAUNCHES):
            scalar.add_(1.0)

    def read() -> None:
        for _ in range(_LAUNCHES):
            scalar.item()

    bench.wait()
    start = time.perf_counter()
    accelerator.release_memory()
    block = torch.empty(256 << 20, dtype=torch.uint8, device=scalar.device)
    bench.wait()
    fresh = time.perf_counter() - start
    del block
    return {
        "launch_s": bench.measure(launch)["seconds"] / _LAUNCHES,
        "host_read_s": bench.measure(read)["seconds"] / _LAUNCHES,
        "allocation_s": fresh,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the products")
    parser.add_argument("--copied-mb", type=int, default=1024, help="MiB of each copy")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
