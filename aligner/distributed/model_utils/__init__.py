"""NeMo-RL's functions on logits and hidden states that are sharded over tensor-parallel ranks.

As published, next-token log-probs are ``[B, S-1]``, and position t describes token t + 1.
"""

from aligner.distributed.model_utils.context_shard import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
)
from aligner.distributed.model_utils.distillation import get_distillation_topk_logprobs_from_logits
from aligner.distributed.model_utils.distributed_softmax import (
    _compute_distributed_log_softmax,
    _compute_distributed_softmax,
)
from aligner.distributed.model_utils.dtensor_logprobs import (
    dtensor_from_parallel_logits_to_logprobs,
    get_logprobs_from_vocab_parallel_logits,
)
from aligner.distributed.model_utils.hidden_logprobs import (
    ChunkedDistributedHiddenStatesToLogprobs,
    from_parallel_hidden_states_to_logprobs,
)
from aligner.distributed.model_utils.linear_ce_patch import (
    _gpt_forward_with_linear_ce_fusion,
    patch_gpt_model_forward_for_linear_ce_fusion,
)
from aligner.distributed.model_utils.logits_logprob import (
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedLogprob,
    DistributedLogprobWithSampling,
)
from aligner.distributed.model_utils.parallel_logprobs import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_next_token_logprobs_from_logits,
)
from aligner.distributed.model_utils.vocab_entropy import (
    ChunkedDistributedEntropy,
    DistributedCrossEntropy,
)
from aligner.distributed.model_utils.vocab_topk import (
    distributed_vocab_topk,
    gather_logits_at_global_indices,
)
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from aligner.logprobs.vocab_sequence_exchange import all_to_all_sq2vp, all_to_all_vp2sq

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
