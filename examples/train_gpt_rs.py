"""Align a GPT by rejection sampling: compose the configuration, build, fit.

python examples/train_gpt_rs.py --help
"""

from pathlib import Path

from aligner.config import RSRunConfig
from aligner.config.cli import launch


def fit(config: RSRunConfig) -> None:
    """Run rejection sampling as configured."""
    from aligner.algorithms.build_rs import train_rs  # imports torch: not needed for --help

    train_rs(config)


if __name__ == "__main__":
    conf = Path(__file__).parents[1] / "conf"
    launch(fit, conf_dir=conf, config_name="gpt_rs", root=RSRunConfig)
