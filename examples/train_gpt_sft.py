"""Fine-tune a GPT on worked examples: compose the configuration, build, fit.

python examples/train_gpt_sft.py --help
"""

from pathlib import Path

from aligner.config import SFTRunConfig
from aligner.config.cli import launch


def fit(config: SFTRunConfig) -> None:
    """Fine-tune as configured."""
    from aligner.algorithms.build_supervised import train_sft  # imports torch: not for --help

    train_sft(config)


if __name__ == "__main__":
    conf = Path(__file__).parents[1] / "conf"
    launch(fit, conf_dir=conf, config_name="gpt_sft", root=SFTRunConfig)
