"""The job that `ppo_step` and `grpo_step` give to both sides. Standard library only."""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from benchmarks.common import peak_mb

# Both sides' optimizer, clipping and PPO constants.
LEARNING_RATE = 1e-5
KL_COEFFICIENT = 0.05
GAMMA, LAM = 1.0, 0.95
RATIO_CLIP = VALUE_CLIP = 0.2
INIT_STD = 0.02
SEED = 1


@dataclass(frozen=True)
class Shape:
    """A Llama, a rollout, and how it is cut."""

    layers: int = 4
    hidden: int = 128
    vocab: int = 1024
    heads: int = 4
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0  # width of the gated MLP. 0: 8/3 of the hidden size, to a multiple of 32
    tied: int = 0  # 1: the output layer is the embedding
    group: int = 1  # responses to a prompt. Of several GRPO is made, without a critic
    batch: int = 32  # sequences of a rollout: one optimizer step of policy and critic each
    micro_batch: int = 32  # sequences of every forward and backward pass
    prompt: int = 32
    response: int = 64
    steps: int = 4  # measured, after one that is not
    threads: int = os.cpu_count() or 1

    @property
    def mlp_width(self) -> int:
        """Width of the gated MLP."""
        return self.ffn or -(-self.hidden * 8 // 3 // 32) * 32

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    def arguments(self) -> list[str]:
        """Return the command line that `shape_of` parses."""
        return [
            text
            for name, value in asdict(self).items()
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of `Shape`, unset by default."""
    for field in fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, help=f"default {field.default}")


def shape_options(options: argparse.Namespace) -> dict[str, int]:
    """Return the fields that the command line set."""
    values = {field.name: getattr(options, field.name) for field in fields(Shape)}
    return {name: value for name, value in values.items() if value is not None}


def shape_of(arguments: Sequence[str] | None = None) -> Shape:
    """Return a shape from the command line of one side."""
    parser = argparse.ArgumentParser()
    add_shape_arguments(parser)
    return Shape(**shape_options(parser.parse_args(arguments)))


class StepClock:
    """Wall and processor seconds of consecutive steps. The first is not measured."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Call before the first step and after every one."""
        self._readings.append((time.perf_counter(), time.process_time()))

    def report(self, side: str, shape: Shape) -> dict[str, Any]:
        """Return the result that one side prints, after its last step."""
        pairs = list(pairwise(self._readings))[1:]
        wall, cpu = ([end[i] - start[i] for start, end in pairs] for i in range(2))
        return {
            "benchmark": "ppo_step" if shape.group == 1 else "grpo_step",
            "side": side,
            **asdict(shape),
            "median_step_s": round(statistics.median(wall), 4),
            "median_step_cpu_s": round(statistics.median(cpu), 4),
            "step_s": [round(seconds, 4) for seconds in wall],
            "maxrss_MB": round(peak_mb(), 1),
        }
