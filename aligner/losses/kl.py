"""KL divergence between the policy and its reference, token by token, and its coefficient.

With ``k1 = log p(token) - log p_ref(token)`` of a token sampled from the policy (Schulman,
"Approximating KL divergence", 2020):

========  ==================  ==================================================
``k1``    ``k1``              unbiased, may be negative
``k2``    ``k1² / 2``         biased, low variance
``k3``    ``exp(-k1)-1+k1``   unbiased, never negative
``abs``   ``|k1|``            a distance, not an estimate
========  ==================  ==================================================

As a term of a loss the estimate is differentiated pathwise, through the log-prob of the sampled
token, and that is the gradient of another quantity than the value: of ``k1`` nothing (its mean is
0), of ``k2`` KL(policy || reference), of ``k3`` KL(reference || policy), of ``abs`` neither (its
size is the same however far the two are apart).

No value is clamped by default: verl, OpenRLHF and NeMo-RL each clamp other quantities, TRL and
NeMo-Aligner none.
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
    # expm1: exp(-k1) - 1 loses all digits where the two policies nearly agree.
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
    """Estimate KL(policy || reference) at each token; differentiable in ``logprobs``.

    ``logprobs``, ``ref_logprobs``: float [B, S], any equal shapes. ``input_clamp`` bounds ``|k1|``
    before the estimator, ``output_clamp`` the estimate after it; where they do, the gradient is 0.
    Masked positions are the caller's to drop.
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
    # Not clamped in the graph: where the estimate overflows its derivative does, and 0 · inf is
    # NaN in the gradient.
    return torch.where(inside, estimate_of(torch.where(inside, k1, 0)), bounded)


class FixedKLController:
    """Holds the KL coefficient β of the reward, and keeps it at the configured value."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def value(self) -> float:
        """β to use for the next rollout."""
        return self._coefficient

    def update(self, current_kl: float, n_samples: int) -> None:
        """Update β by the mean KL per sample of a rollout and its number of samples."""

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs: none, only the configuration decides."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; only that of a controller of the same kind is accepted."""
        if state:
            raise ConfigError(
                f"the run state holds an adaptive KL coefficient ({dict(state)}) but the "
                "configuration has a fixed one; configure the adaptive one, or start a new run"
            )


class AdaptiveKLController(FixedKLController):
    """β follows a target KL (Ziegler et al., 2019, "Fine-Tuning Language Models...", §2.2).

    ``β ← β · (1 + clip(KL / target - 1, ±0.2) · n_samples / horizon)``, where KL is the mean over
    samples of the KL summed over the tokens of a sample.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"adaptive KL control needs target > 0 and horizon > 0, got target={target}, "
                f"horizon={horizon}; give both, or use the fixed controller"
            )
        super().__init__(coefficient)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Move β so that ``current_kl`` approaches the target."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self._coefficient *= 1 + error * n_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The coefficient; target and horizon are the configuration's."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FixedKLController.load_state_dict`."""
        if "coefficient" not in state:
            raise ConfigError(
                "the run state holds no KL coefficient: it was saved by a run with a fixed one; "
                "configure the fixed controller, or start a new run"
            )
        self._coefficient = float(state["coefficient"])
