"""Distillation: the student learns the teacher's next-token distribution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aligner.config import KLDirection
from aligner.losses.masked import BatchAverage
from aligner.types import Denominators, TokenOutputs

# Log-prob of tokens outside the teacher's top k with ``zero_outside_topk``, in nats (as NeMo-RL).
LOG_OUTSIDE = -100.0


@dataclass(frozen=True)
class DistillationLoss:
    """KL divergence over the teacher's ``k`` most likely tokens, mean over the global batch.

    With the teacher ``q``, always renormalised over the k tokens, and the student ``p``::

        forward    Σ_k q·(log q - log p)             covers every mode of the teacher
        backward   Σ_k p·(log p - log q) + rest      avoids tokens that the teacher would not choose
        mixed      w·forward + (1 - w)·backward      w = mixed_weight

    With ``zero_outside_topk`` p is normalised over the whole vocabulary, as if the teacher assigned
    probability 0 to other tokens, and the rest is ``Σ_outside p·(log p - log ε)`` with ``log ε`` =
    -100 nats (the true KL is infinite). Otherwise p is renormalised over the k tokens and the rest
    is 0.

    The formulas are from NeMo-RL (`DistillationLossFn`, ``reverse`` for backward). Hinton et al.,
    2015, describe forward, Gu et al., 2023 (MiniLLM) and Agarwal et al., 2023 (GKD) backward and
    mixed.

    Metrics are means over all tokens: ``loss``, ``forward_kl``, ``backward_kl`` (except with
    ``kl="forward"``) and ``topk_probability``, the student's probability of the k tokens.
    """

    kl: KLDirection = "forward"
    mixed_weight: float = 0.5
    zero_outside_topk: bool = True

    rows_per_group: ClassVar[int] = 1

    @property
    def needs_entropy(self) -> bool:
        """True if the loss contains the rest, which is computed from the student's entropy."""
        return self.zero_outside_topk and self.kl != "forward"

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what one micro-batch adds to the loss and to the metrics.

        ``outputs.values_or_logprobs``: float [B, S, k], the student's log-probs of
        ``teacher_topk_indices`` over the whole vocabulary. ``outputs.entropy``: [B, S]. ``batch``:
        ``teacher_topk_logits`` [B, S, k], ``token_mask`` [B, S] and ``sample_mask`` [B].
        """
        counted = (batch["token_mask"] * batch["sample_mask"][:, None]) > 0
        counted[:, 0] = False  # no position predicts the first token
        logprobs = _zero_uncounted(outputs.values_or_logprobs, counted)
        teacher_logits = _zero_uncounted(batch["teacher_topk_logits"], counted)
        teacher = teacher_logits.to(logprobs).log_softmax(dim=-1)
        student = logprobs if self.zero_outside_topk else logprobs.log_softmax(dim=-1)
        # Both directions of the divergence over the k tokens.
        forward = (teacher.exp() * (teacher - student)).sum(dim=-1)
        backward = (student.exp() * (student - teacher)).sum(dim=-1)
        if self.needs_entropy:
            assert outputs.entropy is not None, "this loss needs the entropy"
            # The tokens outside the top k: Σ p·(log p - log ε).
            probability = student.exp()
            inside = (probability * student).sum(dim=-1)
            outside = LOG_OUTSIDE * (1 - probability.sum(dim=-1))
            entropy = _zero_uncounted(outputs.entropy, counted)
            backward = backward + (-entropy - inside - outside)
        # Select the direction and average over tokens.
        per_token = {
            "forward": forward,
            "backward": backward,
            "mixed": self.mixed_weight * forward + (1 - self.mixed_weight) * backward,
        }[self.kl]
        average = BatchAverage(counted, denominators)
        loss = average(per_token)
        metrics = {
            "loss": loss,
            "forward_kl": average(forward),
            "topk_probability": average(logprobs.exp().sum(dim=-1)),
        }
        if self.kl != "forward":  # the rest would need the entropy
            metrics["backward_kl"] = average(backward)
        return loss, {name: value.detach() for name, value in metrics.items()}


def _zero_uncounted(values: Tensor, counted: Tensor) -> Tensor:
    """Set ``values`` [B, S] or [B, S, k] to 0 where bool ``counted`` [B, S] is False."""
    return values.where(counted if values.ndim == 2 else counted[..., None], 0)
