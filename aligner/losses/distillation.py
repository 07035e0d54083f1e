"""Distillation: the student learns the teacher's next-token distribution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aligner.config import KLDirection
from aligner.losses.masked import BatchAverage
from aligner.types import Denominators, TokenOutputs

# Log-prob of tokens outside the teacher's top k, in nats, where they count: as in NeMo-RL.
LOG_OUTSIDE = -100.0


@dataclass(frozen=True)
class DistillationLoss:
    """KL divergence over the teacher's ``k`` likeliest tokens, a mean over the global batch's
    tokens.

    With the teacher ``q``, always renormalised over its k tokens, and the student ``p``::

        forward    Σ_k q·(log q - log p)             covers every mode of the teacher
        backward   Σ_k p·(log p - log q) + rest      avoids tokens that the teacher would not choose
        mixed      w·forward + (1 - w)·backward      w = mixed_weight

    ``zero_outside_topk`` takes p over the whole vocabulary, as if the teacher gave everything else
    probability 0: the rest is then ``Σ_outside p·(log p - log ε)`` with ``log ε`` = -100 (nats per
    unit of probability; the true KL is infinite). Without it p is renormalised over the k tokens
    and there is no rest: the loss does not depend on the other tokens. With k the whole
    vocabulary both are the KL divergence itself.

    The formulas, the constant and the names are NeMo-RL's (`DistillationLossFn`, there ``reverse``
    for backward); Hinton et al., 2015, for forward, Gu et al., 2023 (MiniLLM) and Agarwal et al.,
    2023 (GKD) for backward and mixed.

    Metrics are shares of global token means: ``loss``, ``forward_kl``, ``backward_kl`` (where the
    loss has it) and ``topk_probability``, the student's probability of the k tokens.
    """

    kl: KLDirection = "forward"
    mixed_weight: float = 0.5
    zero_outside_topk: bool = True

    rows_per_group: ClassVar[int] = 1

    @property
    def needs_entropy(self) -> bool:
        """The rest is what the student's entropy has outside the k tokens."""
        return self.zero_outside_topk and self.kl != "forward"

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric shares of one micro-batch.

        ``outputs.values_or_logprobs`` float [B, S, k]: the student's log-probs, normalised over the
        whole vocabulary, of ``teacher_topk_indices``; ``outputs.entropy`` [B, S]. From ``batch``:
        ``teacher_topk_logits`` [B, S, k], ``token_mask`` [B, S] and ``sample_mask`` [B].
        """
        counted = (batch["token_mask"] * batch["sample_mask"][:, None]) > 0
        counted[:, 0] = False  # nothing precedes it, so no position predicts it
        whole = _only(outputs.values_or_logprobs, counted)
        teacher = _only(batch["teacher_topk_logits"], counted).to(whole).log_softmax(dim=-1)
        student = whole if self.zero_outside_topk else whole.log_softmax(dim=-1)
        forward = (teacher.exp() * (teacher - student)).sum(dim=-1)
        backward = (student.exp() * (student - teacher)).sum(dim=-1)
        if self.needs_entropy:
            assert outputs.entropy is not None, "this loss needs the entropy"
            # The tokens outside of the top k: Σ p·(log p - log ε).
            probability = student.exp()
            inside = (probability * student).sum(dim=-1)
            outside = LOG_OUTSIDE * (1 - probability.sum(dim=-1))
            backward = backward + (-_only(outputs.entropy, counted) - inside - outside)
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
            "topk_probability": average(whole.exp().sum(dim=-1)),
        }
        if self.kl != "forward":  # the rest would take the entropy
            metrics["backward_kl"] = average(backward)
        return loss, {name: value.detach() for name, value in metrics.items()}


def _only(values: Tensor, counted: Tensor) -> Tensor:
    """``values`` [B, S] or [B, S, k] where ``counted`` [B, S]; 0 instead of garbage elsewhere."""
    where = counted if values.ndim == 2 else counted[..., None]
    return values.where(where, 0)
