"""Align a GPT by policy gradients without a critic: compose the configuration, build, fit.

python examples/train_gpt_reinforce.py --help
"""

from pathlib import Path

from aligner.config import RunConfig
from aligner.config.cli import launch


def fit(config: RunConfig) -> None:
    """Train as configured; the trainer is PPO's."""
    from aligner.algorithms.build import train_ppo  # imports torch: not needed for --help

    train_ppo(config)


if __name__ == "__main__":
    launch(fit, conf_dir=Path(__file__).parents[1] / "conf", config_name="gpt_reinforce")
