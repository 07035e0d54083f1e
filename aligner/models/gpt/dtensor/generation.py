"""Generation with a sharded model's weights: aligner's one sampling engine, on a copy of them.

For as long as rollouts are made, the weights stand once more in a megatron-core model of the same
tensor-parallel layout, unsharded over data-parallel ranks: the tokens are those of the megatron
backend. This costs the weights of a tensor-parallel rank, in the dtype of the forward pass, beside
the rank's share.
"""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceWeights
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.dtensor.shards import ParameterShard, WholeParameters
from aligner.models.gpt.megatron.build import build_gpt


def canonical_weights(
    shards: Sequence[ParameterShard], architecture: GPTArchitecture
) -> HuggingFaceWeights:
    """Canonical weights of a sharded model, gathered when indexed; collective."""
    family, _ = config_to_hf(architecture)
    return HuggingFaceWeights(WholeParameters(shards), family.table, architecture)


def megatron_copy(
    shards: Sequence[ParameterShard],
    architecture: GPTArchitecture,
    parallel: ParallelState,
    dtype: torch.dtype,
) -> GPTModel:
    """A megatron-core model with the weights as they are now; collective."""
    gpt = build_gpt(architecture, dtype=dtype, parallel=parallel.config, initialize=False)
    load_weights(
        gpt,
        canonical_weights(shards, architecture),
        architecture,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.config.tensor,
    )
    return gpt.eval().requires_grad_(False)
