"""Fine-tune a GPT on examples.

python examples/train_gpt_sft.py --help
"""

from pathlib import Path

from aligner.catalog import ALGORITHMS
from aligner.config.cli import launch

if __name__ == "__main__":
    algorithm = ALGORITHMS["sft"]
    conf = Path(__file__).parents[1] / "conf"
    launch(algorithm.builder, conf, algorithm.config_name, algorithm.root_class)
