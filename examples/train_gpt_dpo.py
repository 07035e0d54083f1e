"""Optimise a GPT for preferences.

python examples/train_gpt_dpo.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("dpo", Path(__file__).parents[1] / "conf")
