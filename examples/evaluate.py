"""Measure a model on held-out prompts by a reward function or verifier.

python examples/evaluate.py --model MODEL --prompts test.jsonl reward.function=my_rewards.py:reward

MODEL: a `.nemo`, a Hugging Face directory, or the directory of a run.
"""

import sys
from pathlib import Path

from aligner.config import EvaluateConfig
from aligner.config.cli import launch
from aligner.config.commands.options import ASKING, as_overrides


def run(config: EvaluateConfig) -> None:
    """Evaluate as configured."""
    from aligner.algorithms.ask.evaluate import evaluate  # imports torch: not for --help

    evaluate(config)


if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:], ASKING)
    conf = Path(__file__).parents[1] / "conf"
    launch(run, conf_dir=conf, config_name="gpt_evaluate", root=EvaluateConfig)
