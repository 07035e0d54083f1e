"""Convert the adapters of a run to the format of Hugging Face's PEFT.

python examples/convert_lora_to_peft.py --model BASE --adapters RUN.lora.safetensors \
    --output DIR [--base-model HUGGING_FACE_NAME_OR_DIR]
"""

import argparse
import sys

from aligner.errors import AlignerError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the model from which the run started")
    parser.add_argument("--adapters", required=True, help="its *.lora.safetensors")
    parser.add_argument("--output", required=True, help="a new directory to write")
    parser.add_argument("--base-model", help="base model that PEFT loads with the adapters")
    options = parser.parse_args()
    from aligner.checkpoint import convert  # imports torch: not for --help

    print(convert.lora_to_peft(options.model, options.adapters, options.output, options.base_model))


if __name__ == "__main__":
    try:
        main()
    except AlignerError as error:
        sys.exit(f"error: {error}")
