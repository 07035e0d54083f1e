"""Merge the adapters of a run with LoRA into the `.nemo` from which the run started.

python examples/merge_lora.py --model BASE.nemo --adapters RUN.lora.safetensors --output FILE.nemo
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the .nemo from which the run started")
    parser.add_argument("--adapters", required=True, help="its *.lora.safetensors")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    print(convert.merge_lora(options.model, options.adapters, options.output))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
