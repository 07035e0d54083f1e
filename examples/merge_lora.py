"""Merge adapters, which a run with LoRA wrote, into the `.nemo` that the run began with.

python examples/merge_lora.py --model BASE.nemo --adapters RUN.lora.safetensors --output FILE.nemo
"""

import argparse
import sys

from aligner.checkpoint.adapters import MergedWeights, read_adapters
from aligner.checkpoint.nemo import open_nemo, save_nemo
from aligner.errors import AlignerError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the .nemo that the run began with")
    parser.add_argument("--adapters", required=True, help="its *.lora.safetensors")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    options = parser.parse_args()
    with open_nemo(options.model) as nemo:
        adapters = read_adapters(options.adapters, nemo.architecture)
        merged = MergedWeights(nemo.weights, adapters)
        files, keys = nemo.tokenizer_files, adapters.nemo_keys
        save_nemo(options.output, merged, nemo.architecture, files, extra_config=keys)
    print(f"wrote {options.output}: {adapters.lora}")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
