"""Log-probs over sharded vocabularies and sequences, under their published names.

Functions here keep the published frame: targets are already shifted, or come out as [B, S-1].
Groups are explicit arguments and devices those of the tensors. Arithmetic is float32 (float64 for
float64 inputs) without a float32 copy of the logits, and gradients are written by hand.
"""

from aligner.distributed.context_shard import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
)
from aligner.distributed.distillation import get_distillation_topk_logprobs_from_logits
from aligner.distributed.distributed_softmax import (
    _compute_distributed_log_softmax,
    _compute_distributed_softmax,
)
from aligner.distributed.dtensor_logprobs import (
    dtensor_from_parallel_logits_to_logprobs,
    get_logprobs_from_vocab_parallel_logits,
)
from aligner.distributed.fused_logprob import hidden_states_to_logprobs
from aligner.distributed.hidden_logprobs import (
    ChunkedDistributedHiddenStatesToLogprobs,
    from_parallel_hidden_states_to_logprobs,
)
from aligner.distributed.linear_ce_patch import (
    _gpt_forward_with_linear_ce_fusion,
    patch_gpt_model_forward_for_linear_ce_fusion,
)
from aligner.distributed.logits_logprob import (
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    DistributedLogprob,
)
from aligner.distributed.parallel_logprobs import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_next_token_logprobs_from_logits,
)
from aligner.distributed.sampling_logprob import (
    ChunkedDistributedLogprobWithSampling,
    DistributedLogprobWithSampling,
)
from aligner.distributed.sampling_params import TrainingSamplingParams
from aligner.distributed.vocab_entropy import ChunkedDistributedEntropy, DistributedCrossEntropy
from aligner.distributed.vocab_sequence_exchange import all_to_all_sq2vp, all_to_all_vp2sq
from aligner.distributed.vocab_topk import distributed_vocab_topk, gather_logits_at_global_indices

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "TrainingSamplingParams",
    "_compute_distributed_log_softmax",
    "_compute_distributed_softmax",
    "_get_tokens_on_this_cp_rank",
    "_gpt_forward_with_linear_ce_fusion",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "hidden_states_to_logprobs",
    "patch_gpt_model_forward_for_linear_ce_fusion",
]
