"""Distil a larger GPT into a smaller one.

python examples/train_gpt_distill.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("distill", Path(__file__).parents[1] / "conf")
