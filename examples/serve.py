"""Serve a model over HTTP with OpenAI's API.

python examples/serve.py --model MODEL --token-file serve.token

MODEL: a `.nemo`, a Hugging Face directory, or the directory of a run. Ctrl-C ends it.
"""

import sys
from pathlib import Path

from aligner.config import ServeConfig
from aligner.config.cli import launch
from aligner.examples.short_options import SERVING, as_overrides

if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:], SERVING)
    conf = Path(__file__).parents[1] / "conf"
    launch("aligner.algorithms.ask.serve:serve", conf, "gpt_serve", ServeConfig)
