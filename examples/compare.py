"""Compare training runs and evaluations, in an HTML report and a table on the console.

python examples/compare.py results/ppo results/grpo results/evaluation --output results/comparison
"""

import argparse
import sys
from pathlib import Path

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument("--output", type=Path, default=Path("results/comparison"))
    parser.add_argument("--title", default="Comparison")
    options = parser.parse_args()
    from aligner.examples.comparison import compare_runs  # imports torch

    compare_runs(options.runs, options.output, options.title)


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
