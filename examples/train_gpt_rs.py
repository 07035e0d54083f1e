"""Align a GPT by rejection sampling.

python examples/train_gpt_rs.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("rs", Path(__file__).parents[1] / "conf")
