"""Align a GPT by PPO: compose the configuration, build, fit.

python examples/train_gpt_ppo.py --help
"""

from pathlib import Path

from aligner.config import RunConfig
from aligner.config.cli import launch


def fit(config: RunConfig) -> None:
    """Run PPO as configured."""
    from aligner.algorithms.build import train_ppo  # imports torch: not needed for --help

    train_ppo(config)


if __name__ == "__main__":
    launch(fit, conf_dir=Path(__file__).parents[1] / "conf", config_name="gpt_ppo")
