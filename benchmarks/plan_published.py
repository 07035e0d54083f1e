"""Estimates of `plan` for runs whose speed was published, next to the measurements.

    python -m benchmarks.plan_published

Prints a row per run, and exits with 1 if a deviation is more than `TOLERANCE`. Needs a C++ compiler
and no GPU. Sources: Korthikanti et al. 2022 (GPT 22B), Narayanan et al. 2021 (GPT 1.7B, 7.5B),
torchtitan's performance pages (Llama), gpt-fast (decoding). torchtitan recomputes half of the
products (selective by operation), between our ``selective`` and ``full``. Here it is ``full``.
Attention of the GPT runs was not fused. Ours is, which makes estimates of them faster.

Memory: Korthikanti et al. count the bytes of activations of a layer, without dropout ``2 s b h``
with full recomputation, and ``32 s b h / t`` with sequence parallelism and selective recomputation.
The peaks that torchtitan published are upper limits, because it recomputes less.
"""

# ruff: noqa: E402
import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aligner_plan.dry.guard import load_guard

if __name__ == "__main__":  # before torch is loaded, so that --help is quick
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
load_guard()

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.config.load import parse_config
from aligner.config.run import RunConfig, SFTRunConfig
from aligner_plan.devices import DEVICES
from aligner_plan.estimate import Estimate, Estimator
from aligner_plan.options import PlanConfig, varied
from benchmarks.shapes import QWEN_1_5B

TOLERANCE = {"train": 0.20, "generate": 0.25, "activations": 0.10}
_GIB = 1 << 30
_MICRO_BATCH = 4  # sequences. Not published for the runs of 2021

LLAMA_8B = replace(
    QWEN_1_5B,
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_embeddings=False,
    bias_qkv=False,
    family="llama",
)
LLAMA_70B = replace(
    LLAMA_8B, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64
)
LLAMA2_7B = replace(
    LLAMA_8B,
    ffn_hidden_size=11008,
    num_query_groups=32,
    vocab_size=32000,
    max_position_embeddings=4096,
)


@dataclass(frozen=True)
class Published:
    """A run that was measured: its estimate, and the seconds of ``phase``.

    ``activations`` and ``at_most``: GiB of the activations, and upper limit of the peak in GiB.
    """

    name: str
    estimate: Callable[[], Estimate]
    seconds: float
    phase: str = "train"
    activations: float | None = None
    at_most: float = math.inf


def gpt(layers: int, hidden: int, heads: int) -> GPTArchitecture:
    """Return a GPT of the two Megatron papers: 2,048 positions, 51,200 tokens."""
    return architecture_from_hf(
        {
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": hidden,
            "n_head": heads,
            "vocab_size": 51200,
            "n_positions": 2048,
        }
    )


def gpt_seconds(layers: int, hidden: int, devices: int, teraflops: float) -> float:
    """Compute seconds of a step of 512 sequences by the operation count of Narayanan et al."""
    factor = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
    return 96 * 512 * 2048 * layers * hidden**2 * factor / devices / (teraflops * 1e12)


def trained(
    shape: GPTArchitecture, device: str, world: int, rows: int, size: int, **model: Any
) -> Estimate:
    """Estimate a step on ``rows`` full sequences in micro-batches of ``size``."""
    values = {
        "model": {"restore_from_path": "m"},
        "trainer": {"precision": "bf16"},
        "data": {"train": {"source": "not-read.jsonl"}},
    }
    backend = model.pop("backend", "megatron")
    changes = {
        "trainer.devices": min(8, world),
        "trainer.num_nodes": max(1, world // 8),
        "policy.backend": backend,
        "model.global_batch_size": rows,
        "model.micro_batch_size": size,
        **{f"model.{key}": value for key, value in model.items()},
    }
    config = varied(parse_config(values, SFTRunConfig), changes)
    plan = PlanConfig(length=shape.max_position_embeddings)
    return Estimator(plan, DEVICES[device], {"m": shape}).estimate(config)


def sampled(shape: GPTArchitecture, device: str, prompt: int, response: int) -> Estimate:
    """Estimate a rollout of one sequence."""
    values = {
        "reward": {"function": "not.read:reward"},
        "data": {"train": {"source": "not-read.jsonl"}},
        "model": {"restore_from_path": "m"},
        "critic": {},
    }
    sizes = ("global_batch_size", "micro_batch_size")
    changes = {
        "trainer.precision": "bf16",
        "trainer.ppo.initial_policy_kl_penalty": 0.0,
        "model.ppo.num_rollout_samples": 1,
        "model.ppo.rollout_micro_batch_size": 1,
        "model.ppo.length_params.max_length": response,
        "data.max_prompt_length": prompt,
        **{f"{role}.{size}": 1 for role in ("model", "critic") for size in sizes},
    }
    config = varied(parse_config(values, RunConfig), changes)
    return Estimator(PlanConfig(), DEVICES[device], {"m": shape}).estimate(config)


def runs() -> list[Published]:
    """Return the table."""
    full: dict[str, Any] = {"activations_checkpoint_granularity": "full"}
    part = {"activations_checkpoint_granularity": "selective", "sequence_parallel": True}
    fsdp = {"backend": "dtensor", **full}
    large, a100, h100 = gpt(48, 6144, 64), "a100-80g", "h100-80g"
    size, tensor = _MICRO_BATCH, "tensor_model_parallel_size"
    inputs = 2048 * 4 * 6144 * 48 / _GIB  # s b h of all layers of the 22B model
    return [
        Published(
            "GPT 22B, 8 A100, full",
            lambda: trained(large, a100, 8, 4, 4, **{tensor: 8}, **full),
            1.42,
            activations=2 * inputs,
            at_most=80.0,
        ),
        Published(
            "GPT 22B, 8 A100, selective",
            lambda: trained(large, a100, 8, 4, 4, **{tensor: 8}, **part),
            1.10,
            activations=32 * inputs / 8,
            at_most=80.0,
        ),
        Published(
            "GPT 1.7B, 32 A100",
            lambda: trained(gpt(24, 2304, 24), a100, 32, 512, size, **full),
            gpt_seconds(24, 2304, 32, 137),
        ),
        Published(
            "GPT 7.5B, 128 A100",
            lambda: trained(gpt(36, 4096, 32), a100, 128, 512, size, **{tensor: 4}, **full),
            gpt_seconds(36, 4096, 128, 142),
        ),
        Published(
            "Llama 8B, 8 H100",
            lambda: trained(LLAMA_8B, h100, 8, 16, 2, **fsdp),
            16384 / 5762,
            at_most=82.4,
        ),
        Published(
            "Llama 8B, 128 H100",
            lambda: trained(LLAMA_8B, h100, 128, 256, 2, **fsdp),
            16384 / 5605,
            at_most=67.0,
        ),
        Published(
            "Llama 70B, 64 A100",
            lambda: trained(LLAMA_70B, a100, 64, 64, 1, **fsdp),
            8192 / 331,
            at_most=80.0,
        ),
        Published(
            "Llama-2 7B decodes, 1 A100",
            lambda: sampled(LLAMA2_7B, a100, 5, 200),
            200 / 104.9,
            "generate",
        ),
    ]


def main() -> None:
    """Print the table."""
    missed = False
    columns = ("measured s", "planned s", "off", "GiB", "at most", "activ", "published", "off")
    print(f"{'run':28}", *(f"{name:>10}" for name in columns))
    for run in runs():
        phase = run.estimate().phase("policy", run.phase)
        off = phase.seconds / run.seconds - 1
        kinds = {str(kind): size / _GIB for kind, size in phase.peak.items()}
        peak, activations = sum(kinds.values()), kinds["activations"]
        missed |= abs(off) > TOLERANCE[run.phase] or peak > run.at_most
        cells = [f"{run.seconds:.3f}", f"{phase.seconds:.3f}", f"{off:+.0%}"]
        cells += [f"{peak:.1f}", f"{run.at_most:.1f}", f"{activations:.2f}"]
        if run.activations is not None:
            off = activations / run.activations - 1
            missed |= abs(off) > TOLERANCE["activations"]
            cells += [f"{run.activations:.2f}", f"{off:+.0%}"]
        print(f"{run.name:28}", *(f"{cell:>10}" for cell in cells), flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
