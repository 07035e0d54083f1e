"""An actor update on sequences of very different lengths: packed against padded, in one process.

    python -m benchmarks.packing [--model-type olmo2 --fill 0.5]

A log-normal mix of lengths whose mean is ``--fill`` of the longest. ``--model-type``: a model of
transformers with ``policy.backend=dtensor``. Padded micro-batches have ``--micro-batch`` sequences,
each padded to the longest of its micro-batch. Packed ones are a row of as many tokens as such a
micro-batch can have at the most, so both need about the same memory. Both go through
`Policy.train`, in turn, with one optimizer step per update. Their losses must agree. Prints one
JSON line. ``ratio`` is packed real tokens per second over padded, the median over alternating
pairs. Marks: at least 1.8, and 1.5 for a model of transformers. ``cpu_ratio`` is the same of
processor time.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import SequencePackingConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.examples.tasks.tiny_model import random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.policy.lm_policy import Policy
from benchmarks.common import log, peak_mb
from benchmarks.policies import make_policy, run

MARK, MARK_OF_TRANSFORMERS = 1.8, 1.5
SIGMA = 0.6  # of the logarithm of a length


def make_lengths(count: int, longest: int, fill: float) -> np.ndarray:
    """Return int64 ``[count]``, log-normal up to ``longest``, with the share ``fill`` as mean."""
    quantiles = np.random.default_rng(0).lognormal(0.0, SIGMA, count)
    quantiles[0] = np.inf
    low, high = 1.0, float(longest)
    for _ in range(50):
        scale = (low + high) / 2
        mean = np.minimum(quantiles * scale, longest).mean()
        low, high = (scale, high) if mean < longest * fill else (low, scale)
    lengths = np.clip(quantiles * scale, 2, longest).astype(np.int64)
    return np.random.default_rng(1).permutation(lengths)


def make_batch(count: int, longest: int, fill: float, vocab: int) -> BatchedDataDict:
    """Return a rollout. A quarter of each sequence is its prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.from_numpy(make_lengths(count, longest, fill))
    position = torch.arange(longest)
    mask = (position >= (lengths // 4).clamp(min=1)[:, None]) & (position < lengths[:, None])
    advantages = torch.randn(count, longest, generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, vocab, (count, longest), generator=generator),
            "input_lengths": lengths,
            "token_mask": mask.float(),
            "sample_mask": torch.ones(count),
            "advantages": advantages,
            "prev_logprobs": torch.full_like(advantages, -float(np.log(vocab))),
        }
    )


def make_both(options: argparse.Namespace, model: Path) -> tuple[Policy, Policy]:
    """Return two policies, for padded and for packed micro-batches."""
    padded, packed = (
        make_policy(
            model,
            backend="dtensor" if options.model_type else "megatron",
            micro_batch_size=options.micro_batch,
            global_batch_size=options.sequences,
            sequence_packing=SequencePackingConfig(
                enabled=enabled, train_mb_tokens=options.micro_batch * options.longest
            ),
        )
        for enabled in (False, True)
    )
    return padded, packed


def save_directory(folder: Path, model_type: str, architecture: GPTArchitecture) -> Path:
    """Write a random model of a type of transformers with the sizes of the architecture."""
    settings = config_to_hf(architecture)[1] | {"model_type": model_type}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(folder)
    for name, content in byte_level_tokenizer().files().items():
        (folder / name).write_bytes(content)
    return folder


def update(policy: Policy, batch: BatchedDataDict) -> tuple[float, float, float]:
    """Measure loss, wall seconds and processor seconds of one update."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = policy.train(batch, PPOPolicyLoss())["loss"]
    return loss, time.perf_counter() - wall, time.process_time() - cpu


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both forms, after one uncounted update of each."""
    architecture = GPTArchitecture(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.hidden * 8 // 3 // 32 * 32,
        num_attention_heads=options.hidden // 64,
        num_query_groups=options.hidden // 64,
        kv_channels=64,
        vocab_size=options.vocab,
        max_position_embeddings=options.longest,
        family="llama",
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.nemo"
        if options.model_type is None:
            save_nemo(model, random_weights(architecture), architecture, {})
        else:
            model = save_directory(Path(folder), options.model_type, architecture)
        padded, packed = make_both(options, model)
    batch = make_batch(options.sequences, options.longest, options.fill, options.vocab)
    tokens = int(batch["input_lengths"].sum())
    pairs = [(update(padded, batch), update(packed, batch)) for _ in range(options.repeats + 1)]
    losses = [abs(a[0] - b[0]) for a, b in pairs]
    assert max(losses) < 1e-4, f"padded and packed losses differ by {max(losses)}"
    readings = pairs[1:]
    return {
        "benchmark": "packing",
        "model_type": options.model_type,
        "layers": options.layers,
        "hidden": options.hidden,
        "sequences": options.sequences,
        "longest": options.longest,
        "mean_length": round(tokens / options.sequences, 1),
        "micro_batch": options.micro_batch,
        "threads": torch.get_num_threads(),
        "padded_tokens_per_s": round(tokens / statistics.median(a[1] for a, _ in readings)),
        "packed_tokens_per_s": round(tokens / statistics.median(b[1] for _, b in readings)),
        "ratio": round(statistics.median(a[1] / b[1] for a, b in readings), 3),
        "cpu_ratio": round(statistics.median(a[2] / b[2] for a, b in readings), 3),
        "largest_loss_difference": max(losses),
        "maxrss_MB": round(peak_mb(), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--fill", type=float, default=1 / 3, help="mean length over the longest")
    parser.add_argument("--model-type", help="a model of transformers, on policy.backend=dtensor")
    result = run(parser, measure, micro_batch=16, repeats=5)
    mark = MARK if result["model_type"] is None else MARK_OF_TRANSFORMERS
    passed = result["ratio"] >= mark
    log(f"packed over padded {result['ratio']} (mark {mark}: {'kept' if passed else 'MISSED'})")


if __name__ == "__main__":
    main()
