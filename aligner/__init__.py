"""Align language models with reinforcement learning on megatron-core GPT models."""

from aligner import foreign_keys
from aligner.compat import nemo_aligner, paths

__version__ = "0.1.0"
paths.install()
foreign_keys.register(nemo_aligner)
