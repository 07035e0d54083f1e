"""The PPO policy loss (Schulman et al., 2017) with the options of its descendants."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from aligner.config import CorrectionConfig
from aligner.config.fields import AboveOne, NonNegative, Positive
from aligner.config.parse import check_fields
from aligner.errors import ConfigError
from aligner.losses.corrections import correct, gap_metrics
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.losses.masked import (
    Aggregation,
    BatchAverage,
    check_aggregation,
    counted_tokens,
    row_means,
)
from aligner.types import Denominators, TokenOutputs

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo"]


@dataclass(frozen=True)
class PPOPolicyLoss:
    """Clipped surrogate, minus entropy bonus, plus KL to the reference.

    Per generated token, with ``ρ = exp(logprob - prev_logprob)`` and advantage ``A``::

        surrogate = max(-A·ρ, -A·clip(ρ, 1 - ratio_eps_low, 1 + ratio_eps_high))
        surrogate = min(surrogate, -dual_clip·A)   where A < 0     (Ye et al., 2020)
        w         = weights of ``correction``, no gradient; 1 without
        loss      = average of w·surrogate - entropy_bonus·entropy + kl_coefficient·kl

    The average is over the global batch, by default Σ mask·x / valid tokens; `aggregation` has the
    others. Options that make it another algorithm's loss:

    - ``ratio_level="sequence"`` (GSPO, Zheng et al., 2025): all tokens of a row share
      ``ρ = exp(mean over the row of logprob - prev_logprob)``. Its gradient passes through that
      mean (as NeMo-RL, TRL and OpenRLHF; verl's goes to each token with that token's advantage,
      the same where advantages are constant in a row). GSPO itself has ``sequence_mean``.
    - ``surrogate="cispo"`` (MiniMax-M1, 2025): ``-sg(clip(ρ, ...))·A·logprob``. The clipped ratio
      is a weight without gradient, so every token learns (as verl and NeMo-RL; with
      ``ratio_eps_low=1`` only the upper bound is left, as in TRL).
    - ``correction``: weights and masks for rollouts that another policy sampled
      (`losses.corrections`), and whose log-probs ``prev_logprobs`` are. ``importance_cap`` is short
      for weights of ``ratio_level``, truncated at it: at sequence level one of all tokens of a row
      (as NeMo-RL).

    ``kl`` is the estimator of ``losses.kl`` against ``ref_logprobs``, its gradient pathwise
    (as verl and TRL; NeMo-RL adds a score-function term): with ``k1`` it has mean 0 and holds the
    policy to nothing, so runs refuse it. The log-ratio is not clamped (as NeMo-RL
    and TRL; verl and OpenRLHF clamp it to ±20).

    Metrics: ``loss`` as averaged, and shares of global token means: ``ppo_ratio`` (ρ),
    ``ppo_ratio_clamped``, ``clip_fraction`` (tokens whose clipped term is the larger: they get no
    gradient; with cispo tokens whose weight was clipped), ``approx_kl`` (k3 of the rollout policy
    from this one), and by option ``dual_clip_fraction``, ``entropy``, ``kl_loss`` (before its
    coefficient), those of `losses.corrections.correct`; with ``generation_logprobs`` in the batch
    those of `losses.corrections.gap_metrics`. ``ppo_ratio_max`` and ``logprob_gap_max`` are maxima,
    0 without a token.
    """

    ratio_eps_low: float = 0.2
    ratio_eps_high: NonNegative = 0.2
    dual_clip: AboveOne | None = None  # None: off
    entropy_bonus: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    importance_cap: Positive | None = None  # None: as ``correction`` says
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None  # in tokens; fixed_length divides by it
    needs_entropy: bool = True  # as metric; cheap without gradient
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.importance_cap is not None and self.correction.weights != "none":
            raise ConfigError(
                f"importance_cap={self.importance_cap} and correction.weights="
                f"{self.correction.weights} are both weights; give one of them"
            )
        no_lower_bound = self.ratio_eps_low == 1 and self.surrogate == "cispo"
        if not (0 <= self.ratio_eps_low < 1 or no_lower_bound):
            raise ConfigError(
                f"ratio_eps_low={self.ratio_eps_low} must be in [0, 1), or 1 with surrogate=cispo"
            )
        if self.entropy_bonus != 0 and not self.needs_entropy:
            raise ConfigError(
                f"entropy_bonus={self.entropy_bonus} needs the entropy; set needs_entropy=true"
            )
        if self.surrogate == "cispo" and self.dual_clip is not None:
            raise ConfigError(
                f"dual_clip={self.dual_clip} bounds the clipped surrogate, which surrogate=cispo "
                "does not use; use null to turn it off"
            )
        check_aggregation(self.aggregation, self.max_response_length)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric shares of one micro-batch.

        ``outputs.values_or_logprobs`` float [B, S]. From ``batch``: ``advantages``, ``token_mask``
        [B, S], ``sample_mask`` [B]; ``prev_logprobs`` [B, S], which may be absent in a pure
        on-policy mini-batch (the current log-probs, detached, are those of the rollout);
        ``ref_logprobs`` and ``generation_logprobs`` [B, S] where an option needs them.
        """
        logprobs, advantages = outputs.values_or_logprobs, batch["advantages"]
        prev_logprobs = batch.get("prev_logprobs", logprobs.detach())
        mask = counted_tokens(batch, logprobs, advantages, prev_logprobs)
        mean = BatchAverage(mask, denominators)  # of tokens, whatever the loss averages
        average = BatchAverage(mask, denominators, self.aggregation, self.max_response_length)

        # Masked before exp, not after: a masked position may hold a difference that overflows,
        # and 0 · inf would be NaN in the gradient.
        log_ratio = torch.where(mask, logprobs - prev_logprobs, 0)
        whole = log_ratio
        if self.ratio_level == "sequence":
            whole = row_means(log_ratio, mask).unsqueeze(1).expand_as(log_ratio)
        ratio = whole.exp()  # 1 where masked
        advantages = torch.where(mask, advantages, 0)
        if self.surrogate == "cispo":
            surrogate, metrics = self._cispo(ratio, advantages, logprobs, mean)
        else:
            surrogate, metrics = self._clip(ratio, advantages, mean)
        if "generation_logprobs" in batch or self._correction.is_on:
            # With the sampler as the old policy the trainer's log-probs are the present ones.
            trainer = logprobs if self.correction.old_logprobs == "sampler" else prev_logprobs
            gap = trainer.detach() - batch["generation_logprobs"]
            left = batch.get("second_moment_mask")
            weights, corrected = correct(self._correction, gap, mean, left)
            surrogate = surrogate if weights is None else weights * surrogate
            metrics |= gap_metrics(gap, mean) | corrected
        loss = average(surrogate)
        if self.kl_coefficient != 0:
            kl = self._kl(logprobs, batch["ref_logprobs"], mask)
            loss = loss + self.kl_coefficient * average(kl)
            metrics["kl_loss"] = mean(kl.detach())
        if self.needs_entropy:
            assert outputs.entropy is not None, "this loss needs the entropy"
            if self.entropy_bonus != 0:
                loss = loss - self.entropy_bonus * average(outputs.entropy)
            metrics["entropy"] = mean(outputs.entropy.detach())
        # k3 from the policy that sampled: its samples, so the ratio is this policy's over it.
        metrics["approx_kl"] = mean(torch.expm1(log_ratio) - log_ratio)
        metrics["ppo_ratio"] = mean(ratio)
        largest = torch.where(mask, ratio, 0).amax() if ratio.numel() else ratio.new_zeros(())
        metrics["ppo_ratio_max"] = largest
        metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _clipped(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.ratio_eps_low, 1 + self.ratio_eps_high)

    def _cispo(
        self, ratio: Tensor, advantages: Tensor, logprobs: Tensor, mean: BatchAverage
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy gradient's surrogate under a clipped weight, float [B, S], and its metrics."""
        ratio = ratio.detach()
        clamped = self._clipped(ratio)
        metrics = {
            "ppo_ratio_clamped": mean(clamped),
            "clip_fraction": mean((clamped != ratio).to(ratio.dtype)),
        }
        return -clamped * advantages * logprobs, metrics

    def _clip(
        self, ratio: Tensor, advantages: Tensor, mean: BatchAverage
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The pessimistic bound of the objective, negated, float [B, S], and its metrics."""
        clamped = self._clipped(ratio)
        free, clipped = -advantages * ratio, -advantages * clamped
        # Negated, the smaller objective is the larger loss.
        surrogate = torch.maximum(free, clipped)
        metrics = {
            "ppo_ratio_clamped": mean(clamped),
            "clip_fraction": mean((clipped > free).to(ratio.dtype)),
        }
        if self.dual_clip is not None:
            # With A < 0 the loss grows with the ratio without bound: this is the bound.
            ceiling = -self.dual_clip * advantages
            cut = (advantages < 0) & (surrogate > ceiling)
            surrogate = torch.where(cut, ceiling, surrogate)
            metrics["dual_clip_fraction"] = mean(cut.to(ratio.dtype))
        return surrogate, metrics

    @property
    def _correction(self) -> CorrectionConfig:
        if self.importance_cap is None:
            return self.correction
        bounds = (0.0, self.importance_cap)
        return replace(self.correction, weights=self.ratio_level, bounds=bounds)

    def _kl(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """KL estimate to the reference at each token, 0 where masked."""
        # Equal inputs at masked positions keep the estimator finite there, gradient included.
        return kl_estimate(
            torch.where(mask, logprobs, 0),
            torch.where(mask, ref_logprobs, 0),
            self.kl_estimator,
            input_clamp=self.kl_input_clamp,
            output_clamp=self.kl_output_clamp,
        )
