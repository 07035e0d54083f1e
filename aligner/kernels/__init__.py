"""Products and hashes for which a CPU or a GPU has a better way."""

from aligner.importing import import_without

import_without("megatron.core", "wandb")  # for its inference engine, which is not used
