"""Tokens per second of generation: aligner against transformers' ``generate``, same weights.

    python -m benchmarks.generation [--model FILE.nemo] [--batch 16 64] [--json]

Both continue the same prompts by exactly ``--new-tokens`` tokens at temperature 1 (end-of-sequence
banned), in one process, turn by turn. Packing the weights, prefill and sampling are in aligner's
time. ``ratio`` is aligner's rate over transformers', the median over the pairs. Marks at 64 new
tokens on SmolLM2-135M float32: 2.4 at batch 16, 2.1 at batch 64.

With `--on-transformers` aligner samples from the transformers model itself.

On a busy machine `--threads 1 --clock cpu` counts the process's own seconds and is steadier.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.hf.model_folder import save_hf
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import LengthParams, SamplingParams
from aligner.examples.tasks.tiny_model import random_weights
from aligner.models.gpt.decode.generator import GenerationOutput, Generator
from aligner.models.gpt.decode.sampled_model import SampledModel
from aligner.models.gpt.dtensor.sampled_transformers import choose_decoder
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.groups import initialize_parallel
from benchmarks.shapes import SMOLLM2

MODEL = Path("models/smollm2-135m-instruct.nemo")
EOS = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def load_both(path: Path) -> tuple[GPTModel, GPTArchitecture, Any]:
    """Load one set of weights into a megatron-core model and into transformers' model."""
    from transformers import AutoModelForCausalLM

    initialize_parallel()
    with tempfile.TemporaryDirectory() as folder:
        if path.exists():
            with open_nemo(path) as nemo:
                weights, architecture = dict(nemo.weights), nemo.architecture
        else:
            weights, architecture = random_weights(SMOLLM2), SMOLLM2
        gpt = build_gpt(architecture, initialize=False)
        load_weights(gpt, weights, architecture)
        save_hf(Path(folder) / "hf", weights, architecture, {})
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=torch.float32)
    return gpt, architecture, peer.eval()


def logprob_difference(
    gpt: GPTModel | SampledModel, architecture: GPTArchitecture, peer: Any, prompts: torch.Tensor
) -> float:
    """Compute the largest log-prob difference at aligner's greedy tokens."""
    # No end-of-sequence token: banning it would renormalise the log-probs.
    generate = make_generator(gpt, architecture, 8, prompts.shape[0], eos_ids=())
    output = generate(prompts, greedy=True)
    with torch.no_grad():
        logits = peer(output.tokens).logits[:, prompts.shape[1] - 1 : -1].double()
    expected = logits.log_softmax(-1).gather(2, output.tokens[:, prompts.shape[1] :, None])
    difference = expected.squeeze(2) - output.logprobs[:, prompts.shape[1] :]
    return difference.abs().max().item()


def make_generator(
    gpt: GPTModel | SampledModel,
    architecture: GPTArchitecture,
    new_tokens: int,
    batch: int,
    eos_ids: tuple[int, ...] = (EOS,),
) -> Callable[..., GenerationOutput]:
    generator = Generator(
        gpt,
        architecture,
        eos_ids=eos_ids,
        pad_id=EOS,
        length=LengthParams(max_length=new_tokens, min_length=new_tokens),
        sampling=SamplingParams(),
        max_batch_size=batch,
    )

    def run(prompts: torch.Tensor, seed: int = 0, greedy: bool = False) -> GenerationOutput:
        lengths = torch.full((prompts.shape[0],), prompts.shape[1])
        ids = torch.arange(prompts.shape[0])
        return generator.sample(prompts, lengths, ids, seed, greedy=greedy)

    return run


def run_peer(peer: Any, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    return peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def measure(
    gpt: GPTModel | SampledModel,
    architecture: GPTArchitecture,
    peer: Any,
    batch: int,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Alternate the two ``--repeats`` times after one warm-up each."""
    torch.manual_seed(0)
    prompts = torch.randint(100, architecture.vocab_size, (batch, options.prompt_tokens))
    ours = make_generator(gpt, architecture, options.new_tokens, batch)
    tokens = batch * options.new_tokens
    clock = CLOCKS[options.clock]

    def rate(function: Callable[[], object]) -> float:
        start = clock()
        function()
        return tokens / (clock() - start)

    difference = logprob_difference(gpt, architecture, peer, prompts[:4])
    assert difference < 2e-4, f"the two models disagree by {difference}"
    run_peer(peer, prompts, 4)
    make_generator(gpt, architecture, 4, batch)(prompts)
    pairs = [
        (rate(lambda: ours(prompts)), rate(lambda: run_peer(peer, prompts, options.new_tokens)))
        for _ in range(options.repeats)
    ]
    return {
        "benchmark": "generation",
        "batch": batch,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "aligner_tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "transformers_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "ratios": [round(a / b, 2) for a, b in pairs],
        "logprob_difference": difference,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a .nemo; absent: random")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--on-transformers", action="store_true", help="no megatron-core model")
    parser.add_argument("--json", action="store_true", help="one JSON line per batch size")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gpt, architecture, peer = load_both(options.model)
    if options.on_transformers:
        gpt = SampledModel(peer, partial(choose_decoder(peer), peer))
    for batch in options.batch:
        result = measure(gpt, architecture, peer, batch, options)
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            print(
                f"batch {batch}: aligner {result['aligner_tokens_per_s']} tokens/s, transformers "
                f"{result['transformers_tokens_per_s']}, ratio {result['ratio']} "
                f"({result['ratios']})",
                flush=True,
            )


if __name__ == "__main__":
    main()
