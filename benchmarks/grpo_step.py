"""One GRPO step of aligner against one of TRL 1.12.0: time, and peak memory of the process.

    python -m benchmarks.grpo_step
    python -m benchmarks.grpo_step --only aligner --layers 2 --hidden 64 --vocab 512 --json

The same job for both: a random Llama of SmolLM2's shape (float32, tied embeddings). 4 prompts of
256 tokens, 8 responses of exactly 64 to each. No reference. One epoch, one mini-batch, so one
optimizer step. Clipping 0.2. A reward that costs nothing. Every pass takes the 32 sequences at once
unless ``--micro-batch`` is given.

Each reading is a separate process. The two sides take turns, ``--rounds`` times. TRL lives in
`.venv-bench`, made on the first run. Time is the median over the steps after the first. Memory is
the whole process's largest resident set, libraries included. Marks (aligner over TRL): at most 0.25
of the time and 0.4 of the memory.
"""

import argparse
from dataclasses import fields

from benchmarks.ppo_shape import Shape
from benchmarks.ppo_step import Comparison, Mark, run

SMOLLM2 = Shape(
    layers=30,
    hidden=576,
    vocab=49_152,
    heads=9,
    kv_heads=3,
    ffn=1536,
    tied=1,
    group=8,
    prompt=256,
    response=64,
    steps=2,
)
MARK = Mark(SMOLLM2.layers, SMOLLM2.hidden, SMOLLM2.vocab, 0.25, 0.4)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    comparison = Comparison("grpo_step", "benchmarks.grpo_trl", (MARK,))
    run(parser, comparison, [{field.name: getattr(SMOLLM2, field.name) for field in fields(Shape)}])


if __name__ == "__main__":
    main()
