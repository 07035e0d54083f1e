"""Optimise a GPT for preferences: compose the configuration, build, fit.

python examples/train_gpt_dpo.py --help
"""

from pathlib import Path

from aligner.config import DPORunConfig
from aligner.config.cli import launch


def fit(config: DPORunConfig) -> None:
    """Optimise as configured."""
    from aligner.algorithms.build_preference import train_dpo  # imports torch: not for --help

    train_dpo(config)


if __name__ == "__main__":
    conf = Path(__file__).parents[1] / "conf"
    launch(fit, conf_dir=conf, config_name="gpt_dpo", root=DPORunConfig)
