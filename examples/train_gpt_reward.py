"""Train a reward model: compose the configuration, build, fit.

python examples/train_gpt_reward.py --help
"""

from pathlib import Path

from aligner.config import RewardRunConfig
from aligner.config.cli import launch


def fit(config: RewardRunConfig) -> None:
    """Train as configured."""
    from aligner.algorithms.build_reward_model import train_reward_model  # imports torch

    train_reward_model(config)


if __name__ == "__main__":
    conf = Path(__file__).parents[1] / "conf"
    launch(fit, conf_dir=conf, config_name="gpt_reward", root=RewardRunConfig)
