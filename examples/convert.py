"""Convert a model: a Hugging Face directory or a GGUF file to a `.nemo`, or a `.nemo` back.

python examples/convert.py --input DIR_OR_GGUF --output FILE.nemo
python examples/convert.py --input OWNER/NAME --output FILE.nemo download=true
python examples/convert.py --input FILE.nemo --output DIR

The tokenizer is converted, too.
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", required=True, help="a directory, a .gguf, a .nemo or a hub name"
    )
    parser.add_argument("--output", required=True, help="a .nemo, or a directory to write")
    parser.add_argument(
        "download",
        nargs="?",
        choices=("download=true", "download=false"),
        help="whether to download an --input that is named as on Hugging Face's hub",
    )
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    download = options.download == "download=true"
    print(convert.convert(options.input, options.output, download=download))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
