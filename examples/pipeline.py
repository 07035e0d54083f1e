"""Run a pipeline: training runs on the results of earlier runs, and a comparison of all runs.

python examples/pipeline.py conf/pipelines/arithmetic.yaml
"""

import argparse
import sys
from pathlib import Path

from aligner.errors import AlignerError

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path, help="YAML file, such as those of conf/pipelines/")
    arguments = parser.parse_args()
    from aligner.examples.pipeline_stages import run_pipeline  # imports torch: not for --help

    run_pipeline(arguments.pipeline, ROOT / "conf", ROOT / "examples")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:  # the current stage has saved its run state
        sys.exit("ended by Ctrl-C. The same command continues from the last run state")
