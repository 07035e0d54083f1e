"""Log-probs of selected tokens from hidden states, in the one frame of `aligner.types`."""

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.config import SamplingParams
from aligner.distributed.model_utils import hidden_states_to_logprobs
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.hidden_states import full_hidden_states, output_weight
from aligner.models.gpt.token_layout import TokenLayout
from aligner.types import TokenOutputs


def token_logprobs(
    gpt: GPTModel,
    hidden: Tensor,
    input_ids: Tensor,
    selected: Tensor,
    layout: TokenLayout,
    *,
    vocab_size: int,
    parallel: ParallelState,
    sampling: SamplingParams,
    with_entropy: bool = False,
) -> TokenOutputs:
    """Log-prob (and entropy) of the tokens where ``selected``; 0 elsewhere.

    Token t is predicted from the hidden state at t - 1, so positions that are not selected (the
    prompt, padding) are dropped before the output layer and never cost a vocabulary.

    Args:
        gpt: supplies the output weight.
        hidden: ``[n, L, H]``, rows of the layout, with gradients when they are wanted.
        input_ids: int64 ``[B, S]``.
        selected: bool or float ``[B, S]``, true where the log-prob of token t is wanted. Position
            0 has no predecessor and is never computed.
        layout: which row holds which token.
        vocab_size: unpadded vocabulary.
        parallel: process groups.
        sampling: temperature, top-k and top-p of the distribution the tokens were drawn from.
        with_entropy: also return the entropy of that distribution.

    Returns:
        float32 ``[B, S]`` each.
    """
    rows, tokens = layout.predicted_tokens()
    chosen = selected.flatten()[tokens].bool()
    rows, tokens = rows[chosen], tokens[chosen]
    logprobs, entropy = hidden_states_to_logprobs(
        full_hidden_states(gpt, hidden, vocab_parallel=True)[rows],
        output_weight(gpt),
        input_ids.flatten()[tokens],
        tp_group=parallel.tp_group if parallel.config.tensor > 1 else None,
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
