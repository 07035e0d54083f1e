"""Align a GPT by policy gradients without a critic.

python examples/train_gpt_reinforce.py --help
"""

from pathlib import Path

from aligner.catalog import ALGORITHMS
from aligner.config.cli import launch

if __name__ == "__main__":
    algorithm = ALGORITHMS["reinforce"]
    conf = Path(__file__).parents[1] / "conf"
    launch(algorithm.builder, conf, algorithm.config_name, algorithm.root_class)
