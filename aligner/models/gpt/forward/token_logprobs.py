"""Log-probs of selected tokens from hidden states, in the one frame of `aligner.types`."""

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from aligner.config import SamplingParams
from aligner.kernels.wide_product import wide_linear
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.models.gpt.forward.token_layout import BoolArray, TokenLayout
from aligner.types import TokenOutputs


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    selected: BoolArray,
    layout: TokenLayout,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    sampling: SamplingParams,
    with_entropy: bool = False,
) -> TokenOutputs:
    """Log-prob (and entropy) of the tokens where ``selected``; 0 elsewhere.

    Token t is predicted from the hidden state at t - 1, so positions that are not selected (the
    prompt, padding) are dropped before the output layer and never cost a vocabulary.

    Args:
        hidden: ``[n * L, H]``, rows of the layout, with gradients when they are wanted; under
            tensor parallelism its gradient is this rank's part.
        weight: ``[V / tp, H]`` of the output layer; every rank has as many rows.
        input_ids: int64 ``[B, S]``.
        selected: ``[B, S]`` on the host, true where the log-prob of token t is wanted. Position 0
            has no predecessor and is never computed.
        layout: which row holds which token.
        vocab_size: unpadded vocabulary.
        tp_group: spreads the vocabulary; None: it is whole.
        sampling: temperature, top-k and top-p of the distribution the tokens were drawn from.
        with_entropy: also return the entropy of that distribution.

    Returns:
        float32 ``[B, S]`` each.
    """
    rows, tokens = layout.predicted_tokens(selected)
    logprobs, entropy = hidden_states_to_logprobs(
        hidden[rows],
        weight,
        input_ids.flatten()[tokens],
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        with_entropy=with_entropy,
    )
    return TokenOutputs(
        layout.to_frame(logprobs, tokens),
        None if entropy is None else layout.to_frame(entropy, tokens),
    )


def token_logits(
    hidden: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
) -> Tensor:
    """Logits of the token after each one, over ``temperature``: float32 ``[B, S, V]``.

    0 beyond a sequence's length. All of them are in memory at once, on every tensor-parallel rank;
    `token_logprobs` is for those who do not need that. Arguments as there.
    """
    rows, tokens = layout.held_tokens()
    logits = wide_linear(hidden[rows], weight) / temperature
    if tp_group is not None:
        logits = gather_from_tensor_model_parallel_region(logits, group=tp_group)
    return layout.to_frame(logits[:, :vocab_size], tokens)
