"""One rank of `test_engine_error_ranks`: GRPO, in which rank 1's engine fails.

    engine_error_rank.py ERROR FIRST,SECOND,... OVERRIDE [OVERRIDE ...]

``ERROR``: a class of builtins. Calls of the engine are numbered from 1; ``FIRST-`` is that one and
all behind it, and ``-`` none.
"""

import builtins
import os
import sys
from pathlib import Path
from typing import Any

from aligner.catalog import ALGORITHMS
from aligner.config.cli import launch
from aligner.models.gpt.decode.generator import GenerationOutput, Generator

CONF = Path(__file__).parents[2] / "conf"


def fails(number: int, at: str) -> bool:
    first, dash, _ = at.partition("-")
    if dash:
        return bool(first) and number >= int(first)
    return str(number) in at.split(",")


def main() -> None:
    error, at = getattr(builtins, sys.argv.pop(1)), sys.argv.pop(1)
    sample, calls = Generator.sample, 0

    def broken(generator: Generator, *arguments: Any, **given: Any) -> GenerationOutput:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and fails(calls, at):
            raise error("the device fell off the bus")
        return sample(generator, *arguments, **given)

    Generator.sample = broken  # type: ignore[method-assign]
    algorithm = ALGORITHMS["reinforce"]
    launch(algorithm.builder, CONF, algorithm.config_name, algorithm.root_class)


if __name__ == "__main__":
    main()
