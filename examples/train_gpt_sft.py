"""Fine-tune a GPT on worked examples.

python examples/train_gpt_sft.py --help
"""

from pathlib import Path

from aligner.config.cli import launch_algorithm

if __name__ == "__main__":
    launch_algorithm("sft", Path(__file__).parents[1] / "conf")
