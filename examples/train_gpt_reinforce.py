"""Align a GPT by policy gradients without a critic.

python examples/train_gpt_reinforce.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("reinforce", Path(__file__).parents[1] / "conf")
