"""Distil a larger GPT into a smaller one: compose the configuration, build, fit.

python examples/train_gpt_distill.py --help
"""

from pathlib import Path

from aligner.config import DistillRunConfig
from aligner.config.cli import launch


def fit(config: DistillRunConfig) -> None:
    """Distil as configured."""
    from aligner.algorithms.build_distill import train_distill  # imports torch: not for --help

    train_distill(config)


if __name__ == "__main__":
    conf = Path(__file__).parents[1] / "conf"
    launch(fit, conf_dir=conf, config_name="gpt_distill", root=DistillRunConfig)
