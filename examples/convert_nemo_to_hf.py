"""Convert a `.nemo` to a Hugging Face directory (safetensors), tokenizer included.

python examples/convert_nemo_to_hf.py --input FILE.nemo --output DIR
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="the .nemo file")
    parser.add_argument("--output", required=True, help="a new directory to write")
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    print(convert.nemo_to_hf(options.input, options.output))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
