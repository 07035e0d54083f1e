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


class KLController:
    """Controller of the KL coefficient β of the reward, which is fixed without a ``target``.

    For a target KL, ``β ← β · (1 + clip(KL / target - 1, ±0.2) · n_samples / horizon)`` (Ziegler et
    al., 2019, "Fine-Tuning Language Models...", §2.2). KL is summed over a sample's tokens and
    averaged over samples. ``value`` is the coefficient for the next rollout.
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: int = 1) -> None:
        self.value, self._target, self._horizon = coefficient, target, horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Update β from the mean KL per sample of a rollout and the sample count."""
        if self._target is not None:
            error = min(max(current_kl / self._target - 1, -0.2), 0.2)
            self.value *= 1 + error * n_samples / self._horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient, unless it is fixed. The rest comes from the configuration."""
        return {} if self._target is None else {"coefficient": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A fixed and an adaptive coefficient cannot be exchanged."""
        if bool(state) != (self._target is not None):
            kinds = ("an adaptive", "fixed") if state else ("a fixed", "adaptive")
            raise ConfigError(
                f"the run state was saved with {kinds[0]} KL coefficient ({dict(state)}), but the "
                f"configured coefficient is {kinds[1]}. Change trainer.ppo.kl_controller.mode, or "
                "start a new run"
            )
        self.value = float(state.get("coefficient", self.value))
