"""KL divergence between the policy and its reference per token, and controllers of its weight.

With ``k1 = log p(token) - log p_ref(token)`` of a token sampled from the policy (Schulman,
"Approximating KL divergence", 2020):

========  ==================  ==================================================
``k1``    ``k1``              unbiased, may be negative
``k2``    ``k1² / 2``         biased, low variance
``k3``    ``exp(-k1)-1+k1``   unbiased, never negative
``abs``   ``|k1|``            a distance, not an estimate
========  ==================  ==================================================

As a term of a loss, the estimate is differentiated through the log-prob of the sampled token. For
``k1`` this gradient has mean 0, for ``k2`` it is the gradient of KL(policy || reference), for
``k3`` of KL(reference || policy), and for ``abs`` of neither. No value is clamped by default.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.masked import check_choice

KLEstimator = Literal["k1", "k2", "k3", "abs"]

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
    """Estimate KL(policy || reference) at each token, differentiable in ``logprobs``.

    ``logprobs``, ``ref_logprobs``: float [B, S], any equal shapes. ``input_clamp`` bounds ``|k1|``
    before the estimator, ``output_clamp`` the estimate. Clamped positions get gradient 0. The
    caller must drop masked positions.
    """
    assert logprobs.shape == ref_logprobs.shape, (logprobs.shape, ref_logprobs.shape)
    check_choice("kl estimator", estimator, _ESTIMATORS)
    estimate_of = _ESTIMATORS[estimator]
    k1 = logprobs - ref_logprobs
    if input_clamp is not None:
        k1 = k1.clamp(-input_clamp, input_clamp)
    if output_clamp is None:
        return estimate_of(k1)
    estimate = estimate_of(k1.detach())
    bounded, inside = estimate.clamp(-output_clamp, output_clamp), estimate.abs() <= output_clamp
    # The graph contains no clamp of the estimate: if the estimate overflows, its derivative does
    # too, and 0 · inf would be NaN in the gradient.
    return torch.where(inside, estimate_of(torch.where(inside, k1, 0)), bounded)


class FixedKLController:
    """Controller that keeps the KL coefficient β of the reward at the configured value."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def value(self) -> float:
        """The coefficient β for the next rollout."""
        return self._coefficient

    def update(self, current_kl: float, n_samples: int) -> None:
        """Update β from the mean KL per sample of a rollout and the sample count."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because β comes from the configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which must be from a controller of the same class."""
        if state:
            raise ConfigError(
                f"the run state contains an adaptive KL coefficient ({dict(state)}), but the "
                "configured coefficient is fixed. Configure the adaptive controller, or start a "
                "new run"
            )


class AdaptiveKLController(FixedKLController):
    """Controller of β for a target KL (Ziegler et al., 2019, "Fine-Tuning Language Models...").

    ``β ← β · (1 + clip(KL / target - 1, ±0.2) · n_samples / horizon)``. KL is summed over a
    sample's tokens and averaged over samples (§2.2 of the paper).
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"adaptive KL control needs target > 0 and horizon > 0, got target={target}, "
                f"horizon={horizon}. Give both, or use the fixed controller"
            )
        super().__init__(coefficient)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Move β so that ``current_kl`` approaches the target."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self._coefficient *= 1 + error * n_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient. Target and horizon come from the configuration."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, see `FixedKLController.load_state_dict`."""
        if "coefficient" not in state:
            raise ConfigError(
                "the run state contains no KL coefficient, because it was saved with a fixed "
                "coefficient. Configure the fixed controller, or start a new run"
            )
        self._coefficient = float(state["coefficient"])
