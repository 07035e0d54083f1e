"""The output layer by itself: log-probs from hidden states, forward and backward.

    python -m benchmarks.gpu.head --tokens 8192

`hidden_states_to_logprobs`, which never holds the logits: a product in the forward pass and three
in the backward pass, one of which computes the logits again. ``tflops`` counts all four. Beside it
the same four products by themselves, in bfloat16 with float32 sums: as fast as the card is.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

import torch

from aligner.device import accelerator
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from benchmarks.gpu import rates
from benchmarks.shapes import SHAPES

_COLUMNS = 8192  # of the weight, for the products by themselves


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    shape = SHAPES[options.shape]
    size, vocab = shape.hidden_size, shape.vocab_size
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    with machine.Machine(options).running() as bench:
        device = accelerator.device()

        def random(*shape_: int) -> torch.Tensor:
            return torch.empty(shape_, dtype=dtype, device=device).normal_(0.0, size**-0.5)

        hidden = random(options.tokens, size).requires_grad_()
        weight = random(vocab, size).requires_grad_()
        target = torch.randint(0, vocab, (options.tokens,)).to(device)

        shard, sampling = VocabShard.of(weight, vocab, None), TrainingSamplingParams()

        def logprobs() -> torch.Tensor:
            return hidden_states_to_logprobs(hidden, weight, target, shard, sampling)[0]

        def both() -> None:
            hidden.grad = weight.grad = None
            logprobs().sum().backward()

        with torch.no_grad():
            forward = bench.measure(logprobs)
        backward = bench.measure(both)
        kernels = bench.kernels(both) if options.profile else None
        product = 2.0 * options.tokens * size * vocab
        result = {"forward": forward, "forward_backward": backward}
        for part, count in ((forward, 1), (backward, 4)):
            if "seconds" in part:
                part["tflops"] = count * product / part["seconds"] / 1e12
                part["share_of_peak"] = rates.share_of_peak(count * product / part["seconds"])
        if bench.device == "cuda" and dtype is torch.bfloat16:
            columns = min(_COLUMNS, vocab)
            states, right = hidden.detach(), weight.detach()[:columns].t()
            alone = bench.measure(lambda: torch.mm(states, right, out_dtype=torch.float32))
            result["products_alone"] = {"seconds": 4 * alone["seconds"] * vocab / columns}
        if kernels is not None:
            result["kernels"] = kernels
        return machine.report(options, "head", hidden=size, vocab=vocab, **result)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--precision", choices=["bf16", "32"], default="bf16")
    parser.add_argument("--profile", action="store_true", help="kernels by name")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
