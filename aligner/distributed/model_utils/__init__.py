"""NeMo-RL's functions on logits and hidden states that are sharded over tensor-parallel ranks.

As published, next-token log-probs are ``[B, S-1]``, and position t describes token t + 1. The table
of `aligner.compat.paths` lists the modules that define the names.
"""

from typing import Any

from aligner.compat.paths import attribute


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
