"""The PPO policy loss (Schulman et al., 2017) with the options of its descendants."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from aligner.catalog import SURROGATES, imported
from aligner.config import CorrectionConfig
from aligner.config.fields import AboveOne, NonNegative, Positive
from aligner.config.parse import check_fields, refuse
from aligner.config.roles.sampling import KLEstimator, Surrogate
from aligner.losses.corrections import correct, gap_metrics
from aligner.losses.masked import Aggregation, BatchAverage, counted_tokens, row_means
from aligner.types import Denominators, TokenOutputs

RatioLevel = Literal["token", "sequence"]

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda k1: k1,
    "k2": lambda k1: k1.square() / 2,
    # expm1: exp(-k1) - 1 loses all digits if the two policies nearly agree.
    "k3": lambda k1: torch.expm1(-k1) + k1,
    "abs": torch.abs,
}


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: KLEstimator = "k1",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate the KL divergence of policy and reference at each token, float [B, S].

    The estimate is differentiable in ``logprobs``. With ``k1 = log p(token) - log p_ref(token)`` of
    a token that was sampled from the policy (Schulman, "Approximating KL divergence", 2020):

    ========  ==================  ==================================================
    ``k1``    ``k1``              unbiased, may be negative
    ``k2``    ``k1² / 2``         biased, low variance
    ``k3``    ``exp(-k1)-1+k1``   unbiased, never negative
    ``abs``   ``|k1|``            a distance, not an estimate
    ========  ==================  ==================================================

    As a term of a loss, only the log-prob of the sampled token is differentiated. The expected
    gradient of ``k1`` is 0. For ``k2`` it is the gradient of KL(policy || reference), for ``k3``
    that of KL(reference || policy). ``abs`` corresponds to neither.

    ``logprobs``, ``ref_logprobs``: float [B, S] (or any equal shapes). ``input_clamp``: bound of
    ``|k1|``, applied before the estimator. ``output_clamp``: bound of the estimate's absolute
    value. Clamped positions have gradient 0. Masked positions are not treated specially.
    """
    assert logprobs.shape == ref_logprobs.shape, (logprobs.shape, ref_logprobs.shape)
    estimate_of = _ESTIMATORS[estimator]
    k1 = logprobs - ref_logprobs
    if input_clamp is not None:
        k1 = k1.clamp(-input_clamp, input_clamp)
    if output_clamp is None:
        return estimate_of(k1)
    estimate = estimate_of(k1.detach())
    bounded = estimate.clamp(-output_clamp, output_clamp)
    inside = estimate.abs() <= output_clamp
    # The graph contains no clamp of the estimate: if the estimate overflows, its derivative does
    # too, and 0 · inf would be NaN in the gradient.
    return torch.where(inside, estimate_of(torch.where(inside, k1, 0)), bounded)


@dataclass(frozen=True)
class PPOPolicyLoss:
    """PPO's policy loss: clipped surrogate, minus entropy bonus, plus KL to the reference.

    Per generated token, with ``ρ = exp(logprob - prev_logprob)`` and advantage ``A``::

        surrogate = max(-A·ρ, -A·clip(ρ, 1 - ratio_eps_low, 1 + ratio_eps_high))
        surrogate = min(surrogate, -dual_clip·A)   if A < 0        (Ye et al., 2020)
        w         = weights of ``correction``, without gradient, default 1
        loss      = average of w·surrogate - entropy_bonus·entropy + kl_coefficient·kl

    The average is over the global batch, by default Σ mask·x / valid tokens. `losses.masked` lists
    the other values of ``aggregation``. These options produce the losses of other algorithms:

    - ``ratio_level="sequence"`` (GSPO, Zheng et al., 2025): all tokens of a row have the same
      ``ρ = exp(mean over the row of logprob - prev_logprob)``. The gradient flows through the mean,
      as in NeMo-RL, TRL and OpenRLHF. The GSPO paper sets ``aggregation="sequence_mean"``.
    - ``surrogate="cispo"`` (MiniMax-M1, 2025): ``-stop_gradient(clip(ρ, ...))·A·logprob``. Every
      token gets a gradient. ``ratio_eps_low=1`` turns the lower bound off, as in TRL.
    - ``correction``: weights and masks for rollouts that a different policy sampled
      (`losses.corrections`). ``importance_cap=c`` is short for importance weights at the level
      ``ratio_level``, truncated to [0, c].

    ``kl`` is the `kl_estimate` against ``ref_logprobs``. Only the estimate is differentiated, as in
    verl and TRL, while NeMo-RL adds a score-function term. The mean gradient of ``k1`` is 0, so
    configurations with ``k1`` are refused. The log-ratio is not clamped.

    Metrics are ``loss`` and means over all tokens of the global batch: ``ppo_ratio`` (ρ),
    ``ppo_ratio_clamped``, ``clip_fraction`` and ``approx_kl`` (k3 estimate of the KL between
    rollout policy and current policy). ``clip_fraction`` is the share of tokens without gradient,
    because their clipped term is larger. With cispo it is the share of clipped weights. Options add
    ``dual_clip_fraction``, ``entropy``, ``kl_loss`` (before the coefficient) and the metrics of
    `losses.corrections.correct` and `gap_metrics`. ``ppo_ratio_max`` is the maximum of ρ.
    """

    ratio_eps_low: float = 0.2
    ratio_eps_high: NonNegative = 0.2
    dual_clip: AboveOne | None = None  # None: off
    entropy_bonus: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    importance_cap: Positive | None = None  # None: ``correction`` decides
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None  # in tokens, the divisor of fixed_length
    needs_entropy: bool = True  # at least for the metric
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        is_cispo = self.surrogate == "cispo"
        if not (0 <= self.ratio_eps_low < 1 or (self.ratio_eps_low == 1 and is_cispo)):
            yield f"ratio_eps_low={self.ratio_eps_low} must be in [0, 1), or 1 with surrogate=cispo"
        if self.entropy_bonus != 0 and not self.needs_entropy:
            yield f"entropy_bonus={self.entropy_bonus} needs the entropy. Set needs_entropy=true"
        if is_cispo and self.dual_clip is not None:
            yield (
                f"dual_clip={self.dual_clip} bounds the clipped surrogate, which surrogate=cispo "
                "does not use. Set dual_clip=null"
            )

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: current log-probs, float [B, S]. ``batch``: ``advantages``
        [B, S], ``token_mask`` [B, S], ``sample_mask`` [B], ``prev_logprobs`` [B, S] (default: the
        current log-probs, detached), and if an option needs them ``ref_logprobs`` and
        ``generation_logprobs``, both [B, S].
        """
        logprobs, advantages = outputs.values_or_logprobs, batch["advantages"]
        prev_logprobs = batch.get("prev_logprobs", logprobs.detach())
        mask = counted_tokens(batch, logprobs, advantages, prev_logprobs)
        token_mean = BatchAverage(mask, denominators)  # for metrics, whatever the aggregation
        average = BatchAverage(mask, denominators, self.aggregation, self.max_response_length)

        # Masked before exp, not after: a masked position may contain a difference that overflows,
        # and 0 · inf would be NaN in the gradient.
        log_ratio = torch.where(mask, logprobs - prev_logprobs, 0)
        level_log_ratio = log_ratio
        if self.ratio_level == "sequence":
            level_log_ratio = row_means(log_ratio, mask).unsqueeze(1).expand_as(log_ratio)
        ratio = level_log_ratio.exp()  # 1 at masked positions
        advantages = torch.where(mask, advantages, 0)
        surrogate, metrics = self._surrogate_function(self, ratio, advantages, logprobs, token_mean)

        # Correct for the difference between trainer and sampler.
        correction = self._correction
        if "generation_logprobs" in batch or correction.is_on:
            # If the old policy is the sampler, the trainer's log-probs are the current log-probs.
            trainer = logprobs if correction.old_logprobs == "sampler" else prev_logprobs
            gap = trainer.detach() - batch["generation_logprobs"]
            moment_mask = batch.get("second_moment_mask")
            weights, correction_metrics = correct(correction, gap, token_mean, moment_mask)
            surrogate = surrogate if weights is None else weights * surrogate
            metrics |= gap_metrics(gap, token_mean) | correction_metrics
        loss = average(surrogate)

        if self.kl_coefficient != 0:
            # Inputs are 0 at masked positions, so the estimate and its gradient are finite there.
            kl = kl_estimate(
                torch.where(mask, logprobs, 0),
                torch.where(mask, batch["ref_logprobs"], 0),
                self.kl_estimator,
                input_clamp=self.kl_input_clamp,
                output_clamp=self.kl_output_clamp,
            )
            loss = loss + self.kl_coefficient * average(kl)
            metrics["kl_loss"] = token_mean(kl.detach())
        if self.needs_entropy:
            assert outputs.entropy is not None, "this loss needs the entropy"
            if self.entropy_bonus != 0:
                loss = loss - self.entropy_bonus * average(outputs.entropy)
            metrics["entropy"] = token_mean(outputs.entropy.detach())
        # The tokens are samples of the rollout policy, so k3 reads the ratio current / rollout.
        metrics["approx_kl"] = token_mean(torch.expm1(log_ratio) - log_ratio)
        metrics["ppo_ratio"] = token_mean(ratio)
        largest = torch.where(mask, ratio, 0).amax() if ratio.numel() else ratio.new_zeros(())
        metrics["ppo_ratio_max"] = largest
        metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    @cached_property  # imported once, not for each micro-batch
    def _surrogate_function(self) -> "SurrogateFunction":
        return imported(SURROGATES[self.surrogate].function)

    @property
    def _correction(self) -> CorrectionConfig:
        if self.importance_cap is None:
            return self.correction
        bounds = (0.0, self.importance_cap)
        return replace(self.correction, weights=self.ratio_level, bounds=bounds)


# Arguments as in `clip_surrogate`. Returns the term to minimise, float [B, S], and metrics.
SurrogateFunction = Callable[
    [PPOPolicyLoss, Tensor, Tensor, Tensor, BatchAverage], tuple[Tensor, dict[str, Tensor]]
]


def clip_surrogate(
    loss: PPOPolicyLoss, ratio: Tensor, advantages: Tensor, logprobs: Tensor, mean: BatchAverage
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate per token, to be minimised, float [B, S], and its metrics.

    ``ratio``: float [B, S], 1 at masked positions. ``advantages``: float [B, S], 0 at masked
    positions. ``mean``: averages a metric over tokens. ``logprobs`` is not read.
    """
    clamped = ratio.clamp(1 - loss.ratio_eps_low, 1 + loss.ratio_eps_high)
    unclipped, clipped = -advantages * ratio, -advantages * clamped
    surrogate = torch.maximum(unclipped, clipped)
    metrics = {
        "ppo_ratio_clamped": mean(clamped),
        "clip_fraction": mean((clipped > unclipped).to(ratio.dtype)),
    }
    if loss.dual_clip is not None:
        # With A < 0 the loss grows with the ratio without bound. The dual clip is the bound.
        ceiling = -loss.dual_clip * advantages
        is_cut = (advantages < 0) & (surrogate > ceiling)
        surrogate = torch.where(is_cut, ceiling, surrogate)
        metrics["dual_clip_fraction"] = mean(is_cut.to(ratio.dtype))
    return surrogate, metrics


def cispo_surrogate(
    loss: PPOPolicyLoss, ratio: Tensor, advantages: Tensor, logprobs: Tensor, mean: BatchAverage
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute CISPO's surrogate per token, to be minimised, float [B, S], and its metrics.

    ``ratio``, ``advantages``, ``logprobs``: float [B, S]. Only ``logprobs`` gets a gradient.
    """
    ratio = ratio.detach()
    clamped = ratio.clamp(1 - loss.ratio_eps_low, 1 + loss.ratio_eps_high)
    metrics = {
        "ppo_ratio_clamped": mean(clamped),
        "clip_fraction": mean((clamped != ratio).to(ratio.dtype)),
    }
    return -clamped * advantages * logprobs, metrics
