"""One PPO step of aligner against one of TRL 1.12.0: time, and peak memory of the process.

    python -m benchmarks.ppo_step            # both shapes, both sides
    python -m benchmarks.ppo_step --only aligner --layers 4 --hidden 128 --vocab 1024 --json

The same job for both: a random Llama (float32, untied, 4 heads) as policy, as reference and, with a
scalar head, as critic. 32 prompts of 32 tokens, 32 responses of exactly 64. KL to the reference in
the reward. One epoch, one mini-batch, so one optimizer step of each model. Clipping 0.2 on both
losses. A reward that costs nothing. Every pass takes the 32 sequences at once unless
``--micro-batch`` is given. TRL's gradient checkpointing is off: that is its faster setting.

What each does with it:

* aligner (`ppo_aligner`): generate → reward → values → log-probs → reference log-probs →
  advantages → critic update → policy update, each model with its optimizer and clipped gradients.
* TRL (`ppo_trl`): generate, keeping every logit → log-probs from those → reference log-probs →
  values → reward → advantages → one update of policy and critic together, gradients not clipped.

Each reading is a separate process. The two sides take turns, ``--rounds`` times. TRL lives in
`.venv-bench`, made on the first run. Time is the median over the steps after the first. Memory is
the whole process's largest resident set, libraries included. Marks (aligner over TRL): at most 0.5
of the time for 4 layers of 128 and 1,024 tokens. At most 0.25 of the time and 0.33 of the memory
for 2 layers of 64 and 128,256 tokens.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, log, make_environment, read_json, stdout_reserved, verdict
from benchmarks.ppo_shape import Shape, add_shape_arguments, shape_options

PEER = ROOT / ".venv-bench"
# torch first: TRL's requirements would pull another build of it.
# requests: TRL imports it and does not ask for it.
PEER_PACKAGES = [["torch==2.13.0"], ["trl==1.12.0", "transformers==5.23.0", "requests"]]
PEER_ENVIRONMENT = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
SIDES = ("aligner", "trl")


@dataclass(frozen=True)
class Mark:
    """Largest ratios that count as kept. None: memory is not judged at this shape."""

    layers: int
    hidden: int
    vocab: int
    time: float
    memory: float | None

    def fits(self, shape: Shape) -> bool:
        """Return whether this mark is for ``shape``."""
        return (self.layers, self.hidden, self.vocab) == (shape.layers, shape.hidden, shape.vocab)


@dataclass(frozen=True)
class Comparison:
    """A benchmark of two sides: its name, TRL's module, and its marks."""

    name: str
    peer_module: str
    marks: tuple[Mark, ...]


PPO = Comparison(
    "ppo_step",
    "benchmarks.ppo_trl",
    (Mark(4, 128, 1024, 0.5, None), Mark(2, 64, 128_256, 0.25, 0.33)),
)


def read(side: str, shape: Shape, comparison: Comparison, peer: Path | None) -> dict[str, Any]:
    """Read one side once, in a separate process."""
    if side == "trl":
        assert peer is not None
        return read_json(peer, comparison.peer_module, shape.arguments(), PEER_ENVIRONMENT)
    return read_json(sys.executable, "benchmarks.ppo_aligner", shape.arguments())


def compare(
    shape: Shape, comparison: Comparison, sides: tuple[str, ...], rounds: int
) -> dict[str, Any]:
    """Run the sides in turn, and compute medians over the rounds and ratios of two sides."""
    peer = make_environment(PEER, PEER_PACKAGES) if "trl" in sides else None
    readings: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            result = read(side, shape, comparison, peer)
            readings[side].append(result)
            log(
                f"{side} {shape.layers}x{shape.hidden} vocabulary {shape.vocab}: "
                f"{result['median_step_s']} s, {result['maxrss_MB']} MB"
            )
    medians = {side: _medians(rows) for side, rows in readings.items()}
    if len(sides) == 1:
        return {**readings[sides[0]][-1], **medians[sides[0]]}
    ours, theirs = (medians[side] for side in SIDES)
    return {
        "benchmark": comparison.name,
        **{key: readings["aligner"][0][key] for key in ("layers", "hidden", "vocab", "threads")},
        **medians,
        "time_ratio": round(ours["median_step_s"] / theirs["median_step_s"], 4),
        "memory_ratio": round(ours["maxrss_MB"] / theirs["maxrss_MB"], 4),
    }


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("median_step_s", "median_step_cpu_s", "maxrss_MB")
    return {key: round(statistics.median(row[key] for row in rows), 4) for key in keys}


def report(shape: Shape, comparison: Comparison, result: dict[str, Any]) -> str:
    """Print one line of times and verdicts."""
    ratios = [("time", result["time_ratio"]), ("memory", result["memory_ratio"])]
    mark = next((mark for mark in comparison.marks if mark.fits(shape)), None)
    limits = {} if mark is None else {"time": mark.time, "memory": mark.memory}
    judged = [verdict(name, ratio, limits.get(name)) for name, ratio in ratios]
    sides = [
        f"{side} {result[side]['median_step_s']} s, {result[side]['maxrss_MB']:.0f} MB"
        for side in SIDES
    ]
    shown = f"{shape.layers} layers of {shape.hidden}, vocabulary {shape.vocab}"
    return "; ".join([f"{shown}: {sides[0]}", sides[1], *judged])


def run(
    parser: argparse.ArgumentParser, comparison: Comparison, shapes: Sequence[Mapping[str, int]]
) -> None:
    """Run the command line of a comparison, by default for each of ``shapes``."""
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument("--rounds", type=int, help="readings of each side; default 3, --only 1")
    parser.add_argument("--json", action="store_true", help="one line of JSON per shape")
    add_shape_arguments(parser)
    options = parser.parse_args()
    wanted_shape = shape_options(options)
    sides = SIDES if options.only is None else (options.only,)
    rounds = options.rounds or (3 if options.only is None else 1)
    own_shape = options.only is not None or wanted_shape.keys() & {"layers", "hidden", "vocab"}
    for sizes in shapes[:1] if own_shape else shapes:
        shape = Shape(**{**sizes, **wanted_shape})
        with stdout_reserved():
            result = compare(shape, comparison, sides, rounds)
        line = options.json or options.only is not None
        print(json.dumps(result) if line else report(shape, comparison, result), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [{"layers": m.layers, "hidden": m.hidden, "vocab": m.vocab} for m in PPO.marks]
    run(parser, PPO, sizes)


if __name__ == "__main__":
    main()
