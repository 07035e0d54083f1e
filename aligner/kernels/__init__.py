"""Matrix products that are faster or more exact than PyTorch's.

oneDNN products and packed weights are used on CPUs only. With them and `layers.short_attention`, a
PPO step of a small model takes 0.48 of TRL's time (0.61 without them), and generation is 2.0 to 2.5
times as fast as with transformers (`benchmarks/LOG.md`, 2026-11-22).
"""

from aligner.importing import import_without

import_without("megatron.core", "wandb")  # needed only by its inference engine, which is unused
