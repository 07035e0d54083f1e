"""NeMo-RL's functions on logits and hidden states that are sharded over tensor-parallel ranks.

As in NeMo-RL, next-token log-probs are ``[B, S-1]``: position t has the log-prob of token t + 1.
Each name is imported from the module in which `aligner.compat.paths` lists it.
"""

from typing import Any

from aligner.compat.paths import attribute


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
