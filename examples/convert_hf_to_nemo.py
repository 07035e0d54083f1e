"""Convert a Hugging Face directory (safetensors) or a GGUF file to a `.nemo`, tokenizer included.

python examples/convert_hf_to_nemo.py --input DIR_OR_GGUF --output FILE.nemo
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    print(convert.hf_to_nemo(options.input, options.output))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
