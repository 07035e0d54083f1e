"""The vocabulary: names, shapes and meanings of everything that passes between parts.

Shape legend: ``B`` sequences, ``S`` padded length (prompt + response), ``P`` padded prompt
length, ``V`` vocabulary, ``H`` hidden, ``N`` selected tokens.

Every per-token tensor has length ``S`` and position ``t`` speaks of token ``t``:
``logprobs[:, t] = log p(token_t | tokens_<t)`` with ``logprobs[:, 0] = 0``, and
``values[:, t] = V(state before token t)`` with ``values[:, 0] = 0``.

Keys of a rollout batch (a ``BatchedDataDict``):

=========================  ==============  =====================================================
``input_ids``              int64 [B, S]    prompt and response, right-padded
``input_lengths``          int64 [B]       prompt + response
``position_ids``           int64 [B, S]    of conversations that may fork: position in its sequence,
                                           from 0 in each that the row holds; 0 in padding
``prompt_lengths``         int64 [B]       prompt only
``sample_ids``             int64 [B]       identifies the sample for counter-based sampling
``is_end``                 bool [B]        the response ended by itself (EOS or stop string)
``token_mask``             float32 [B, S]  1 where the token was generated (EOS included)
``turn_ids``               int64 [B, S]    of conversations: number of the turn that generated the
                                           token, from 1; 0 where the token was not generated
``turn_rewards``           float32 [B, S]  of conversations: reward of a turn, at its last token,
                                           and of its steps, at theirs
``is_scored``              float32 [B]     of conversations: 1 where at least one turn was scored
``sample_mask``            float32 [B]     1 where the sample counts
``generation_logprobs``    float32 [B, S]  of the sampling engine
``kept_ids``               int32 [B, S, K] ids that top-k and top-p kept, -1 where there are fewer
``prev_logprobs``          float32 [B, S]  of the policy that produced the rollout
``second_moment_mask``     float32 [B, S]  0 where M2PO leaves a token out (`losses.corrections`)
``ref_logprobs``           float32 [B, S]  of the frozen reference policy
``values``                 float32 [B, S]  of the critic before it was trained on this rollout
``rewards``                float32 [B]     scalar reward of the sample
``shaped_rewards``         float32 [B]     the same after shaping, before any KL penalty
``shaped_turn_rewards``    float32 [B, S]  of conversations: the same of turns
``advantages``             float32 [B, S]
``returns``                float32 [B, S]
``teacher_topk_indices``   int64 [B,S,k]   the tokens that a teacher finds likeliest at position t
``teacher_topk_logits``    float32 [B,S,k] their logits, over the temperature
=========================  ==============  =====================================================
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

# What fills up shorter rows of a column, where it is not 0.
PAD_VALUES: Mapping[str, int] = {"kept_ids": -1}


class Denominators(NamedTuple):
    """Counts over the whole global batch and all data-parallel ranks, taken before micro-batch 1.

    ``valid_tokens`` = sum(token_mask * sample_mask), ``valid_seqs`` = sum(sample_mask); float32
    scalars, at least 1 so that a batch without a valid token has loss 0 instead of NaN.
    """

    valid_tokens: Tensor
    valid_seqs: Tensor


class TokenOutputs(NamedTuple):
    """Outputs of a model for each token of a micro-batch.

    ``values_or_logprobs``: float32 [B, S]; log-probs for a policy ([B, S, k] of the tokens that
    ``teacher_topk_indices`` names, where the batch has them), values for a critic, rewards for a
    reward model ([B, S, K] where it rates K attributes).
    ``entropy``: float32 [B, S] of the distribution token t was sampled from, or None.
    Positions outside ``token_mask`` may hold anything finite.
    """

    values_or_logprobs: Tensor
    entropy: Tensor | None = None


class LossFunction(Protocol):
    """A loss over one micro-batch.

    Returns ``(loss, metrics)``: the micro-batch's *share* of the global loss, that is
    ``sum(mask * x) / denominators.valid_tokens``, so that summing over micro-batches and
    data-parallel ranks gives the global value and gradient. Metrics are detached scalars that add
    up the same way, except keys that end in ``_max`` or ``_min``, which are combined so.
    """

    @property
    def needs_entropy(self) -> bool:
        """True if ``outputs.entropy`` must be there."""
        ...

    @property
    def rows_per_group(self) -> int:
        """Number of adjacent rows that are compared, in one micro-batch. `1` means each by itself."""
        ...

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and metrics of one micro-batch.

        ``batch``: the columns of `aligner.types` that the loss reads, such as ``token_mask``
        float32 [B, S] and ``sample_mask`` float32 [B]. Returns scalars.
        """
        ...
