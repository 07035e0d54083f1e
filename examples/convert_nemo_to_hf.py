"""Convert a `.nemo` to a Hugging Face directory (safetensors), tokenizer included.

python examples/convert_nemo_to_hf.py --input FILE.nemo --output DIR
"""

import argparse
import sys

from aligner.checkpoint.hf import save_hf
from aligner.checkpoint.nemo import open_nemo
from aligner.errors import AlignerError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="the .nemo file")
    parser.add_argument("--output", required=True, help="directory to write; must not exist yet")
    options = parser.parse_args()
    with open_nemo(options.input) as nemo:
        save_hf(options.output, nemo.weights, nemo.architecture, nemo.tokenizer_files)
        print(f"wrote {options.output}: {nemo.architecture}")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
