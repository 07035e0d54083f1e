"""Convert adapters that a run wrote to the format of Hugging Face's PEFT.

python examples/convert_lora_to_peft.py --model BASE.nemo --adapters RUN.lora.safetensors \
    --output DIR [--base-model HUGGING_FACE_NAME_OR_DIR]
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the .nemo that the run began with")
    parser.add_argument("--adapters", required=True, help="its *.lora.safetensors")
    parser.add_argument("--output", required=True, help="directory to write; must not exist yet")
    parser.add_argument("--base-model", help="what PEFT shall load beside the adapters")
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    print(convert.lora_to_peft(options.model, options.adapters, options.output, options.base_model))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
