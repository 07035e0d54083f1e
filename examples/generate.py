"""Answer prompts with a model, or converse with it.

python examples/generate.py --model MODEL --prompt "12+3="
python examples/generate.py --model MODEL --prompts prompts.jsonl --output answers.jsonl
python examples/generate.py --model MODEL --chat

MODEL: a `.nemo`, a Hugging Face directory, or the directory of a run.
"""

import sys
from pathlib import Path

from aligner.config import GenerateConfig
from aligner.config.cli import launch
from aligner.examples.short_options import ASKING, as_overrides

if __name__ == "__main__":
    flags, repeated = {"--chat": "chat=true"}, {"--prompt": "prompt"}
    sys.argv[1:] = as_overrides(sys.argv[1:], ASKING, flags=flags, repeated=repeated)
    conf = Path(__file__).parents[1] / "conf"
    launch("aligner.algorithms.ask.generate:generate", conf, "gpt_generate", GenerateConfig)
