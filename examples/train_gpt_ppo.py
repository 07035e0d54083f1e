"""Align a GPT by PPO.

python examples/train_gpt_ppo.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("ppo", Path(__file__).parents[1] / "conf")
