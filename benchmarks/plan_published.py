"""Estimates of `plan` for runs whose speed or memory was published, next to the measurements.

    python -m benchmarks.plan_published

Prints a row per run, and exits with 1 if a time is off by more than `TOLERANCE`, or memory by more
than `MEMORY_TOLERANCE`. Needs a C++ compiler and no GPU. Sources of times: Korthikanti et al. 2022
(GPT 22B), Narayanan et al. 2021 (GPT 1.7B, 7.5B), torchtitan's performance pages (Llama), gpt-fast
(decoding). torchtitan recomputes half of the products (selective by operation), between our
``selective`` and ``full``. Here it is ``full``. Attention of the GPT runs was not fused. Ours is,
which makes estimates of them faster.

Memory of GPT 22B is the activations by the formulas of Korthikanti et al., without the masks of
dropout and the scores of attention. Peaks of Llama-2 7B in layouts of 8 cards are those of
Megatron-LM's pull request 482 (2,048 tokens, unfused SwiGLU, dropout, all logits), its peak with
FSDP2 that of torchtitan's pull request 165 without the float32 logits, which our loss never makes.
torchtitan's page states reserved memory. FSDP2 allocates gradients on a stream of its own, so they
stay reserved. What 16 times as many cards save is therefore all that is sharded, gradients too.
"""

# ruff: noqa: E402
import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from aligner_plan.dry.guard import load_guard

if __name__ == "__main__":  # before torch is loaded, so that --help is quick
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
load_guard()

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.config.load import parse_config
from aligner.config.run import RunConfig, SFTRunConfig
from aligner_plan.amounts import total
from aligner_plan.devices import DEVICES
from aligner_plan.dry.record import Kind
from aligner_plan.estimate import Estimate, Estimator
from aligner_plan.options import PlanConfig, varied
from benchmarks.shapes import QWEN_1_5B

TOLERANCE = {"train": 0.20, "generate": 0.25}
MEMORY_TOLERANCE = 0.10
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


def peak(estimate: Estimate) -> float:
    """Return the bytes on the fullest card."""
    return estimate.peak_bytes


def activations(estimate: Estimate) -> float:
    """Return the bytes of activations at the peak of the update."""
    return estimate.phase("policy", "train").peak[Kind.ACTIVATIONS]


def sharded(estimate: Estimate) -> float:
    """Return the bytes of weights, gradients and optimizer."""
    return total(estimate.roles["policy"].static)


@dataclass(frozen=True)
class Memory:
    """Published memory of a card.

    ``relation``: ``<`` if the estimate must be below it, ``>`` above it, ``=`` near it.
    """

    gib: float
    planned: Callable[[Estimate], float] = peak
    relation: str = "="

    def misses(self, planned: float) -> bool:
        """Return whether ``planned`` bytes do not agree."""
        off = planned / _GIB / self.gib - 1
        bounds = {"=": (-MEMORY_TOLERANCE, MEMORY_TOLERANCE), "<": (-1.0, 0.0), ">": (0.0, 99.0)}
        low, high = bounds[self.relation]
        return not low <= off <= high


@dataclass(frozen=True)
class Published:
    """A run that was measured: its estimate, the seconds of ``phase``, and its memory."""

    name: str
    estimate: Callable[[], Estimate]
    seconds: float | None = None
    memory: Memory | None = None
    phase: str = "train"

    def compare(self) -> tuple[str, bool]:
        """Return the row of the table, and whether the estimate is off by too much."""
        estimate, missed = self.estimate(), False
        cells = [f"{self.name:29}"]
        if self.seconds is None:
            cells.append(f"{'':28}")
        else:
            seconds = estimate.phase("policy", self.phase).seconds
            off = seconds / self.seconds - 1
            missed = abs(off) > TOLERANCE[self.phase]
            cells.append(f"{self.seconds:10.3f} {seconds:10.3f} {off:+6.0%}")
        if self.memory is not None:
            size = self.memory.planned(estimate)
            missed |= self.memory.misses(size)
            compared = f"{self.memory.relation}{self.memory.gib:.1f}"
            off = size / _GIB / self.memory.gib - 1
            cells.append(
                f"{compared:>13} {size / _GIB:11.1f} {off:+6.0%} {self.memory.planned.__name__}"
            )
        return " ".join(cells).rstrip(), missed


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


@cache
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


def llama_8b(world: int, recompute: str = "full") -> Estimate:
    """Estimate torchtitan's run of Llama 3.1 8B on ``world`` cards."""
    options = {"backend": "dtensor", "activations_checkpoint_granularity": recompute}
    return trained(LLAMA_8B, "h100-80g", world, 2 * world, 2, **options)


def saved_by_sharding(estimate: Estimate) -> float:
    """Return the bytes of a card of Llama 8B that 16 times as many cards save."""
    return sharded(estimate) - sharded(llama_8b(128))


def runs() -> list[Published]:
    """Return the table."""
    full: dict[str, Any] = {"activations_checkpoint_granularity": "full"}
    part = {"activations_checkpoint_granularity": "selective", "sequence_parallel": True}
    fsdp = {"backend": "dtensor", **full}
    large, a100, h100 = gpt(48, 6144, 64), "a100-80g", "h100-80g"
    size, tensor = _MICRO_BATCH, "tensor_model_parallel_size"
    # GiB of one byte for each element of the hidden states of all layers of GPT 22B.
    byte = 4 * 2048 * 6144 * 48 / _GIB
    llama_7b = replace(LLAMA2_7B, max_position_embeddings=2048)
    logits = 8 * 2048 * 32000 * 4 / _GIB

    def llama(micro_batch: int, **layout: Any) -> Callable[[], Estimate]:
        return lambda: trained(llama_7b, h100, 8, 64, micro_batch, **layout)

    return [
        Published(
            "GPT 22B, 8 A100, full",
            lambda: trained(large, a100, 8, 4, 4, **{tensor: 8}, **full),
            1.42,
            Memory(2 * byte, activations),
        ),
        Published(
            "GPT 22B, 8 A100, selective",
            lambda: trained(large, a100, 8, 4, 4, **{tensor: 8}, **part),
            1.10,
            Memory((34 - 2) / 8 * byte, activations),
        ),
        Published(
            "GPT 22B, 8 A100, tensor",
            lambda: trained(large, a100, 8, 4, 4, **{tensor: 8}),
            memory=Memory((10 - 2 + 24 / 8) * byte, activations),
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
        Published("Llama 8B, 8 H100", lambda: llama_8b(8), 16384 / 5762, Memory(82.4, peak, "<")),
        Published(
            "Llama 8B, 8 H100, selective",
            lambda: llama_8b(8, "selective"),
            memory=Memory(82.4, peak, ">"),
        ),
        Published(
            "Llama 8B, 128 H100", lambda: llama_8b(128), 16384 / 5605, Memory(67.0, peak, "<")
        ),
        Published(
            "Llama 8B, 128 H100, selective",
            lambda: llama_8b(128, "selective"),
            memory=Memory(67.0, peak, ">"),
        ),
        Published(
            "Llama 8B, 8 less 128 H100",
            lambda: llama_8b(8),
            memory=Memory(82.4 - 67.0, saved_by_sharding),
        ),
        Published(
            "Llama 70B, 64 A100",
            lambda: trained(LLAMA_70B, a100, 64, 64, 1, **fsdp),
            8192 / 331,
            Memory(80e9 / _GIB, peak, "<"),
        ),
        Published(
            "Llama-2 7B, 8 H100, FSDP2", llama(8, **fsdp), memory=Memory(0.2392 * 95.04 - logits)
        ),
        Published("Llama-2 7B, 8 H800, DP 8", llama(2), memory=Memory(69.1)),
        Published("Llama-2 7B, 8 H800, TP 2", llama(4, **{tensor: 2}), memory=Memory(55.7)),
        Published(
            "Llama-2 7B, 8 H800, PP 2",
            llama(2, pipeline_model_parallel_size=2),
            memory=Memory(49.8),
        ),
        Published("Llama-2 7B, 8 H800, TP 8", llama(4, **{tensor: 8}), memory=Memory(28.8)),
        Published(
            "Llama-2 7B decodes, 1 A100",
            lambda: sampled(LLAMA2_7B, a100, 5, 200),
            200 / 104.9,
            phase="generate",
        ),
    ]


def main() -> None:
    """Print the table."""
    any_missed = False
    print(
        f"{'run':29} {'measured s':>10} {'planned s':>10} {'off':>6} {'published GiB':>13} "
        f"{'planned GiB':>11} {'off':>6} of"
    )
    for run in runs():
        row, missed = run.compare()
        any_missed |= missed
        print(row, flush=True)
    sys.exit(any_missed)


if __name__ == "__main__":
    main()
