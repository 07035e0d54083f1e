"""Run a pipeline: training runs that each take what an earlier one left, and one comparison.

python examples/pipeline.py conf/pipelines/arithmetic.yaml
"""

import argparse
import sys
from pathlib import Path

from aligner.errors import AlignerError

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path, help="YAML file, such as those of conf/pipelines/")
    arguments = parser.parse_args()
    from aligner.examples.pipeline_stages import run_pipeline  # imports much: not for --help

    run_pipeline(arguments.pipeline, ROOT / "conf", ROOT / "examples")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:  # the stage at hand has saved its run state
        sys.exit("ended by Ctrl-C; the same command goes on from there")
