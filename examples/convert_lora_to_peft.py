"""Convert adapters that a run wrote to the format of Hugging Face's PEFT.

python examples/convert_lora_to_peft.py --model BASE.nemo --adapters RUN.lora.safetensors \
    --output DIR [--base-model HUGGING_FACE_NAME_OR_DIR]
"""

import argparse
import sys

from aligner.checkpoint.adapters import read_adapters
from aligner.checkpoint.hf_peft import save_peft
from aligner.checkpoint.nemo import open_nemo
from aligner.errors import AlignerError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the .nemo that the run began with")
    parser.add_argument("--adapters", required=True, help="its *.lora.safetensors")
    parser.add_argument("--output", required=True, help="directory to write; must not exist yet")
    parser.add_argument("--base-model", help="what PEFT shall load beside the adapters")
    options = parser.parse_args()
    with open_nemo(options.model) as nemo:
        architecture = nemo.architecture
    adapters = read_adapters(options.adapters, architecture)
    save_peft(options.output, adapters, architecture, options.base_model)
    print(f"wrote {options.output}: {adapters.lora}")


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
