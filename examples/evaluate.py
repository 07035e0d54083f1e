"""Measure a model on held-out prompts by a reward function or verifier.

python examples/evaluate.py --model MODEL --prompts test.jsonl reward.function=my_rewards.py:reward

MODEL: a `.nemo`, a Hugging Face directory, or the directory of a run.
"""

import sys
from pathlib import Path

from aligner.config import EvaluateConfig
from aligner.config.cli import launch
from aligner.examples.short_options import ASKING, as_overrides

if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:], ASKING)
    conf = Path(__file__).parents[1] / "conf"
    launch("aligner.algorithms.ask.evaluate:evaluate", conf, "gpt_evaluate", EvaluateConfig)
