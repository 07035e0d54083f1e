"""Print the command of this library for a configuration of NeMo-RL or NeMo-Aligner.

python examples/translate.py grpo_math_1B.yaml
"""

import argparse
from pathlib import Path

from aligner.config.cli import reported_errors
from aligner.config.translation.command import translate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="YAML file, in the same folder as its `defaults`")
    with reported_errors():
        print(translate(parser.parse_args().file))
