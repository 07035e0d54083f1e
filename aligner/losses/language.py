"""Maximum likelihood of given responses."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aligner.losses.masked import BatchAverage, CheckedLoss, counted_tokens
from aligner.types import Denominators, TokenOutputs


@dataclass(frozen=True)
class NegativeLogLikelihoodLoss(CheckedLoss):
    """Loss of supervised fine-tuning and rejection sampling, ``-Σ mask·logprob / valid tokens``.

    ``token_mask`` is 1 at the response's tokens, end-of-sequence token included. Every token of the
    global batch weighs the same (NeMo-RL, verl). Metrics are means over all tokens: ``loss`` in
    nats per token and ``token_probability`` (``exp(logprob)``).
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what one micro-batch adds to the loss and to the metrics.

        ``outputs.values_or_logprobs``: float [B, S]. ``batch``: ``token_mask`` [B, S] and
        ``sample_mask`` [B].
        """
        logprobs = outputs.values_or_logprobs
        mean = BatchAverage(counted_tokens(batch, logprobs), denominators)
        loss = -mean(logprobs)
        probability = mean(logprobs.detach().exp())
        return loss, {"loss": loss.detach(), "token_probability": probability}
