"""The clipped value loss of PPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import TypedDict  # pydantic's, below Python 3.12

from aligner.config.fields import NonNegative, Positive
from aligner.config.parse import build, check_fields
from aligner.losses.interfaces import LossInputType, PublishedLoss
from aligner.losses.masked import BatchAverage, counted_tokens
from aligner.types import Denominators, LossFunction, TokenOutputs


@dataclass(frozen=True)
class PPOValueLoss:
    """PPO's value loss: squared error to the returns, with clipped predictions.

    Per generated token, with prediction ``V``, return ``R`` and ``V_prev``, the prediction during
    the rollout::

        loss = ½ · Σ mask · max((V - R)², (V_prev + clip(V - V_prev, ±value_clip) - R)²)
               / global valid tokens

    Values are padded, [B, S]: ``values[:, t]`` is the value of the state *before* token ``t``.
    ``value_clip=None`` turns clipping off. Metrics are means over all tokens: ``loss`` and
    ``clip_fraction``, the share of tokens whose clipped term is larger.
    """

    value_clip: Positive | None = 0.2  # None: off
    needs_entropy: bool = False  # a critic computes no entropy
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: values, float [B, S]. ``batch``: ``returns`` [B, S],
        ``token_mask`` [B, S], ``sample_mask`` [B], and with clipping ``values`` [B, S], predicted
        during the rollout.
        """
        predicted, returns = outputs.values_or_logprobs, batch["returns"]
        mask = counted_tokens(batch, predicted, returns)
        # Masked before squaring, so that large values at masked positions cannot overflow.
        predicted, returns = torch.where(mask, predicted, 0), torch.where(mask, returns, 0)
        mean = BatchAverage(mask, denominators)
        squared_error = (predicted - returns).square()
        larger_error = squared_error
        if self.value_clip is not None:
            previous = torch.where(mask, batch["values"], 0)
            # Not previous + clip(predicted - previous), which rounds also without clipping.
            clipped = predicted.clamp(previous - self.value_clip, previous + self.value_clip)
            larger_error = torch.maximum(squared_error, (clipped - returns).square())
        loss = mean(larger_error) / 2
        is_clipped = (larger_error > squared_error).to(loss.dtype)
        return loss, {"loss": loss.detach(), "clip_fraction": mean(is_clipped)}


class MseValueLossConfig(TypedDict, total=False):
    """Settings of `MseValueLossFn`. Both keys are optional."""

    scale: NonNegative  # factor of the loss, default 1
    cliprange: NonNegative | None  # value_clip of `PPOValueLoss`. None (default) and 0: off


class MseValueLossFn:
    """`PPOValueLoss` with NeMo-RL's published interface.

    ``cfg``: settings. By default the loss is half the squared error.
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
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``logits``: float32 ``[B, S]`` or ``[B, S, 1]``, value of the state before each token.
        ``data``: the columns that `PPOValueLoss` reads. ``global_valid_toks``: number of unmasked
        tokens in the global batch, a scalar.
        """
        values = logits.squeeze(-1) if logits.ndim == 3 else logits
        denominators = Denominators(valid_tokens=global_valid_toks, valid_seqs=global_valid_seqs)
        loss, metrics = self._loss(TokenOutputs(values), data, denominators)
        return self.scale * loss, {**metrics, "loss": self.scale * metrics["loss"]}


def right_shift_values(values: Tensor) -> Tensor:
    """Move ``values``, float ``[B, S]``, one position to the right. Position 0 gets 0.

    The input has at position t the value after token t, the result the value before token t.
    """
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


class RightShiftedLoss:
    """Value loss of a critic whose output at position t is the value after token t.

    The output is shifted right, then passed to ``loss_fn``, a loss of values before each token with
    the interface of this library or of NeMo-RL.
    """

    needs_entropy: ClassVar[bool] = False

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn if isinstance(loss_fn, LossFunction) else PublishedLoss(loss_fn)
        self.rows_per_group = self.loss_fn.rows_per_group

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call ``loss_fn`` with ``outputs.values_or_logprobs``, float32 [B, S], shifted right."""
        shifted = TokenOutputs(right_shift_values(outputs.values_or_logprobs))
        return self.loss_fn(shifted, batch, denominators)
