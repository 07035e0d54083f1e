"""Convert a Hugging Face directory (safetensors) or a GGUF file to a `.nemo`, tokenizer included.

python examples/convert_hf_to_nemo.py --input DIR_OR_GGUF --output FILE.nemo
"""

import argparse
import sys

from aligner.checkpoint.hf import read_hf
from aligner.checkpoint.nemo import save_nemo
from aligner.errors import AlignerError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    options = parser.parse_args()
    model = read_hf(options.input)
    save_nemo(options.output, model.weights, model.architecture, model.tokenizer_files)
    print(f"wrote {options.output}: {model.architecture}")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
