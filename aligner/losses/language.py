"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aligner.losses.masked import BatchAverage, CheckedLoss, counted_tokens
from aligner.types import Denominators, TokenOutputs


@dataclass(frozen=True)
class NegativeLogLikelihoodLoss(CheckedLoss):
    """Loss of supervised fine-tuning and rejection sampling, ``-Σ mask·logprob / valid tokens``.

    ``token_mask`` is 1 at the response's tokens, end-of-sequence token included. All tokens of the
    global batch have the same weight, as in NeMo-RL and verl. Metrics are means over these tokens:
    ``loss`` in nats and ``token_probability``, the mean of ``exp(logprob)``.
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: log-probs, float [B, S]. ``batch``: ``token_mask`` [B, S]
        and ``sample_mask`` [B].
        """
        logprobs = outputs.values_or_logprobs
        mean = BatchAverage(counted_tokens(batch, logprobs), denominators)
        loss = -mean(logprobs)
        probability = mean(logprobs.detach().exp())
        return loss, {"loss": loss.detach(), "token_probability": probability}
