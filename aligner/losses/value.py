"""The clipped value loss of PPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import TypedDict  # pydantic's, below Python 3.12

from aligner.config.fields import NonNegative, Positive
from aligner.config.parse import build, check_fields
from aligner.losses.interfaces import LossInputType, to_loss_function
from aligner.losses.masked import BatchAverage, counted_tokens
from aligner.types import Denominators, TokenOutputs


@dataclass(frozen=True)
class PPOValueLoss:
    """Squared error to the returns, with the prediction clipped to the rollout's value.

    Per generated token, with prediction ``V``, the rollout's value ``V_prev`` and return ``R``::

        loss = ½ · Σ mask · max((V - R)², (V_prev + clip(V - V_prev, ±value_clip) - R)²)
               / global valid tokens

    Values are padded, [B, S]: ``values[:, t]`` is the value of the state *before* token ``t``.
    ``value_clip=None`` is the plain squared error. Metrics are means over all tokens: ``loss`` and
    ``clip_fraction`` (tokens whose clipped term is the larger).
    """

    value_clip: Positive | None = 0.2  # None: off
    needs_entropy: bool = False  # a critic computes no entropy
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what one micro-batch adds to the loss and to the metrics.

        ``outputs.values_or_logprobs``: float [B, S]. ``batch``: ``returns`` [B, S], ``token_mask``
        [B, S], ``sample_mask`` [B], and with clipping the rollout's ``values`` [B, S].
        """
        predicted, returns = outputs.values_or_logprobs, batch["returns"]
        mask = counted_tokens(batch, predicted, returns)
        # Masked before squaring, so that large values at masked positions cannot overflow.
        predicted, returns = torch.where(mask, predicted, 0), torch.where(mask, returns, 0)
        mean = BatchAverage(mask, denominators)
        squared_error = (predicted - returns).square()
        worst = squared_error
        if self.value_clip is not None:
            previous = torch.where(mask, batch["values"], 0)
            # Not previous + clip(predicted - previous), which rounds also without clipping.
            clipped = predicted.clamp(previous - self.value_clip, previous + self.value_clip)
            worst = torch.maximum(squared_error, (clipped - returns).square())
        loss = mean(worst) / 2
        metrics = {"loss": loss, "clip_fraction": mean((worst > squared_error).to(loss.dtype))}
        return loss, {name: value.detach() for name, value in metrics.items()}


class MseValueLossConfig(TypedDict, total=False):
    """Settings of `MseValueLossFn`. Both are optional."""

    scale: NonNegative  # default 1
    cliprange: NonNegative | None  # None (default) and 0 turn clipping off


class MseValueLossFn:
    """Value loss with NeMo-RL's published interface: `PPOValueLoss` times ``scale``.

    ``cfg``: ``scale`` and ``cliprange``. The default is half the squared error.
    """

    input_type = LossInputType.LOGIT

    def __init__(self, cfg: MseValueLossConfig | None = None) -> None:
        schema: type[Any] = MseValueLossConfig
        settings: dict[str, Any] = build(schema, cfg or {}, "loss_fn")
        self.scale = settings.get("scale", 1.0)
        self.cliprange = settings.get("cliprange") or None
        self._loss = PPOValueLoss(self.cliprange)

    def __call__(
        self,
        logits: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what one micro-batch adds to the loss and to the metrics.

        ``logits``: values float32 ``[B, S]`` or ``[B, S, 1]``, of the states before each token.
        ``data``: as the batch of `PPOValueLoss`. ``global_valid_toks``: denominator of the mean, a
        scalar.
        """
        values = logits.squeeze(-1) if logits.ndim == 3 else logits
        denominators = Denominators(valid_tokens=global_valid_toks, valid_seqs=global_valid_seqs)
        loss, metrics = self._loss(TokenOutputs(values), data, denominators)
        return self.scale * loss, {**metrics, "loss": self.scale * metrics["loss"]}


def right_shift_values(values: Tensor) -> Tensor:
    """Shift values after each token to values before each token, float ``[B, S]``.

    Position t gets the value of position t - 1, position 0 gets 0.
    """
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


class RightShiftedLoss:
    """Value loss for a critic whose output at position t is the value after token t.

    ``loss_fn``: loss of values before each token, with this library's or the published interface.
    """

    needs_entropy: ClassVar[bool] = False

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = to_loss_function(loss_fn)
        self.rows_per_group = self.loss_fn.rows_per_group

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of shifted ``outputs.values_or_logprobs`` float32 ``[B, S]``."""
        # Values before each token.
        shifted = TokenOutputs(right_shift_values(outputs.values_or_logprobs))
        return self.loss_fn(shifted, batch, denominators)
