"""Names, shapes and meanings of tensors in batches, and interfaces of losses.

Shape legend: ``B`` sequences, ``S`` padded length (prompt + response), ``P`` padded prompt
length, ``V`` vocabulary, ``H`` hidden, ``N`` selected tokens.

Column ``t`` of a per-token tensor, [B, S], describes token ``t``:
``logprobs[:, t] = log p(token_t | tokens_<t)`` with ``logprobs[:, 0] = 0``, and
``values[:, t] = V(state before token t)`` with ``values[:, 0] = 0``.

Keys of a rollout batch (a ``BatchedDataDict``):

=========================  ==============  =====================================================
``input_ids``              int64 [B, S]    prompt and response, right-padded
``input_lengths``          int64 [B]       prompt + response
``position_ids``           int64 [B, S]    of conversations that may fork: position in the sequence,
                                           from 0 in each sequence of the row, 0 in padding
``prompt_lengths``         int64 [B]       prompt only
``sample_ids``             int64 [B]       number of the sample, for counter-based sampling
``is_end``                 bool [B]        the response ended by itself (EOS or stop string)
``token_mask``             float32 [B, S]  1 where the token was generated (EOS included)
``turn_ids``               int64 [B, S]    of conversations: index from 1 of the turn that generated
                                           the token, 0 if the token was not generated
``turn_rewards``           float32 [B, S]  of conversations: reward of a turn at its last token, and
                                           rewards of its steps at their last tokens
``is_scored``              float32 [B]     of conversations: 1 if at least one turn was scored
``sample_mask``            float32 [B]     1 if the sample is used in the loss
``generation_logprobs``    float32 [B, S]  of the sampling engine
``kept_ids``               int32 [B, S, K] ids that top-k and top-p kept, padded with -1
``prev_logprobs``          float32 [B, S]  of the policy that produced the rollout
``second_moment_mask``     float32 [B, S]  0 if M2PO excludes the token (`losses.corrections`)
``ref_logprobs``           float32 [B, S]  of the frozen reference policy
``values``                 float32 [B, S]  of the critic before it was trained on this rollout
``rewards``                float32 [B]     scalar reward of the sample
``shaped_rewards``         float32 [B]     reward after shaping, before any KL penalty
``shaped_turn_rewards``    float32 [B, S]  of conversations: turn rewards after shaping
``advantages``             float32 [B, S]
``returns``                float32 [B, S]
``teacher_topk_indices``   int64 [B,S,k]   most probable tokens of a teacher at position t
``teacher_topk_logits``    float32 [B,S,k] their logits, divided by the temperature
=========================  ==============  =====================================================
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

# Padding values of columns that are not padded with 0.
PAD_VALUES: Mapping[str, int] = {"kept_ids": -1}


class Denominators(NamedTuple):
    """Token and sequence counts of a global batch, over all data-parallel ranks, for mean losses.

    ``valid_tokens`` = sum(token_mask * sample_mask), ``valid_seqs`` = sum(sample_mask). Both are
    float32 scalars and at least 1, so that a batch without valid tokens has the loss 0, not NaN.
    """

    valid_tokens: Tensor
    valid_seqs: Tensor


class TokenOutputs(NamedTuple):
    """Outputs of a model for the tokens of a micro-batch.

    ``values_or_logprobs``: float32 [B, S]: log-probs of a policy, values of a critic, or rewards of
    a reward model ([B, S, K] for K attributes). If the batch has ``teacher_topk_indices``:
    log-probs of these tokens, [B, S, k]. ``entropy``: float32 [B, S], entropy of the distribution
    from which token t was sampled, or None. Where ``token_mask`` is 0, values are arbitrary but
    finite.
    """

    values_or_logprobs: Tensor
    entropy: Tensor | None = None


@runtime_checkable
class LossFunction(Protocol):
    """Function that computes the loss and metrics of one micro-batch.

    The loss is the micro-batch's share of the global loss, such as ``sum(mask * x) /
    denominators.valid_tokens``. Losses and metrics are summed over micro-batches and data-parallel
    ranks. Metrics whose names end in ``_max`` or ``_min`` are combined by maximum or minimum.
    """

    @property
    def needs_entropy(self) -> bool:
        """True if the loss reads ``outputs.entropy``."""
        ...

    @property
    def rows_per_group(self) -> int:
        """Number of adjacent rows that the loss compares, which must be in the same micro-batch."""
        ...

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and metrics of one micro-batch.

        ``batch``: columns that the loss reads, such as ``token_mask`` float32 [B, S] and
        ``sample_mask`` float32 [B]. Returns (scalar loss, dict from metric to detached scalar).
        """
        ...
