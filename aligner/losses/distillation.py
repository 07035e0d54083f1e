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
    """KL divergence between teacher and student over the teacher's ``k`` most likely tokens.

    The loss is the mean over the tokens of the global batch. With the teacher's probabilities
    ``q``, renormalised over the k tokens, and the student's ``p``::

        forward    Σ_k q·(log q - log p)             covers every mode of the teacher
        backward   Σ_k p·(log p - log q) + rest      avoids tokens that the teacher would not choose
        mixed      w·forward + (1 - w)·backward      w = mixed_weight

    ``zero_outside_topk=True``: p is normalised over the whole vocabulary. Outside the k tokens the
    teacher has probability ε with ``log ε = -100`` nats, so ``rest = Σ_outside p·(log p - log ε)``.
    With probability 0 the KL would be infinite. ``zero_outside_topk=False``: p is renormalised over
    the k tokens and ``rest = 0``.

    The formulas are those of NeMo-RL's `DistillationLossFn`, where backward is called ``reverse``.
    Papers: Hinton et al., 2015 (forward), and for backward and mixed Gu et al., 2023 (MiniLLM) and
    Agarwal et al., 2023 (GKD).

    Metrics are means over all tokens: ``loss``, ``forward_kl``, ``backward_kl`` (absent with
    ``kl="forward"``) and ``topk_probability``, the student's total probability of the k tokens.
    """

    kl: KLDirection = "forward"
    mixed_weight: float = 0.5
    zero_outside_topk: bool = True

    rows_per_group: ClassVar[int] = 1

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss contains ``rest``, which is computed from the student's entropy."""
        return self.zero_outside_topk and self.kl != "forward"

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: float [B, S, k], the student's log-probs of the teacher's k
        tokens, normalised over the whole vocabulary. ``outputs.entropy``: float [B, S], in nats.
        ``batch``: ``teacher_topk_logits`` [B, S, k], ``token_mask`` [B, S], ``sample_mask`` [B].
        """
        mask = (batch["token_mask"] * batch["sample_mask"][:, None]) > 0
        mask[:, 0] = False  # no position predicts the first token
        logprobs = _zero_masked(outputs.values_or_logprobs, mask)
        teacher_logits = _zero_masked(batch["teacher_topk_logits"], mask)
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
            entropy = _zero_masked(outputs.entropy, mask)
            backward = backward + (-entropy - inside - outside)
        # Select the direction and average over tokens.
        per_token = {
            "forward": forward,
            "backward": backward,
            "mixed": self.mixed_weight * forward + (1 - self.mixed_weight) * backward,
        }[self.kl]
        average = BatchAverage(mask, denominators)
        loss = average(per_token)
        metrics = {
            "loss": loss,
            "forward_kl": average(forward),
            "topk_probability": average(logprobs.exp().sum(dim=-1)),
        }
        if self.kl != "forward":  # with forward, the entropy for ``rest`` is not computed
            metrics["backward_kl"] = average(backward)
        return loss, {name: value.detach() for name, value in metrics.items()}


def _zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Set ``values`` [B, S] or [B, S, k] to 0 where bool ``mask`` [B, S] is False."""
    return values.where(mask if values.ndim == 2 else mask[..., None], 0)
