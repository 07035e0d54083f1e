"""Train a reward model.

python examples/train_gpt_reward.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("reward", Path(__file__).parents[1] / "conf")
