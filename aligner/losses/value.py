"""The clipped value loss of PPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import TypedDict  # pydantic's, below Python 3.12

from aligner.config.fields import NonNegative, Positive
from aligner.config.parse import build, check_fields
from aligner.losses.interfaces import LossInputType, as_loss
from aligner.losses.masked import BatchAverage, counted_tokens
from aligner.types import Denominators, TokenOutputs


@dataclass(frozen=True)
class PPOValueLoss:
    """Squared error to the returns, the prediction kept near the rollout's.

    Per generated token, with prediction ``V``, the rollout's value ``V_prev`` and return ``R``::

        loss = ½ · Σ mask · max((V - R)², (V_prev + clip(V - V_prev, ±value_clip) - R)²)
               / global valid tokens

    Values are padded, [B, S]: ``values[:, t]`` is the value of the state *before* token ``t``,
    the head's output shifted right by one. ``value_clip=None`` is the plain squared error.

    Metrics are shares of global token means: ``loss`` and ``clip_fraction`` (tokens whose clipped
    term is the larger).
    """

    value_clip: Positive | None = 0.2  # None: off
    needs_entropy: bool = False  # a critic has none
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric shares of one micro-batch.

        ``outputs.values_or_logprobs`` float [B, S]. From ``batch``: ``returns``, ``token_mask``
        [B, S], ``sample_mask`` [B], and with clipping ``values`` [B, S] of the rollout.
        """
        predicted, returns = outputs.values_or_logprobs, batch["returns"]
        mask = counted_tokens(batch, predicted, returns)
        # Masked before squaring: large finite garbage must not overflow into the gradient.
        predicted, returns = torch.where(mask, predicted, 0), torch.where(mask, returns, 0)
        mean = BatchAverage(mask, denominators)
        squared_error = (predicted - returns).square()
        worst = squared_error
        if self.value_clip is not None:
            before = torch.where(mask, batch["values"], 0)
            # Not before + clip(predicted - before): that is another float where nothing is clipped.
            near = predicted.clamp(before - self.value_clip, before + self.value_clip)
            worst = torch.maximum(squared_error, (near - returns).square())
        loss = mean(worst) / 2
        metrics = {"loss": loss, "clip_fraction": mean((worst > squared_error).to(loss.dtype))}
        return loss, {name: value.detach() for name, value in metrics.items()}


class MseValueLossConfig(TypedDict, total=False):
    """Settings of `MseValueLossFn`; both may be absent."""

    scale: NonNegative  # default 1
    cliprange: NonNegative | None  # default None; None and 0: no clipping


class MseValueLossFn:
    """`PPOValueLoss` times ``scale``, as NeMo-RL publishes it.

    Args:
        cfg: ``scale`` and ``cliprange``; by default the plain squared error, halved.
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
        """Loss and metric shares of one micro-batch.

        Args:
            logits: values float32 ``[B, S]`` or ``[B, S, 1]``, of the states before each token.
            data: ``returns``, ``token_mask`` ``[B, S]``, ``sample_mask`` ``[B]``, and with clipping
                ``values`` ``[B, S]`` of the rollout.
            global_valid_seqs: not read.
            global_valid_toks: the denominator.
        """
        values = logits.squeeze(-1) if logits.ndim == 3 else logits
        denominators = Denominators(valid_tokens=global_valid_toks, valid_seqs=global_valid_seqs)
        loss, metrics = self._loss(TokenOutputs(values), data, denominators)
        return self.scale * loss, {**metrics, "loss": self.scale * metrics["loss"]}


def right_shift_values(values: Tensor) -> Tensor:
    """Float numbers ``[B, S]`` read at each token as values of the states before each token.

    Position t gets the number read at t - 1, position 0 gets 0.
    """
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


class RightShiftedLoss:
    """A value loss for a critic whose output speaks of the token just read.

    ``loss_fn``: of values before each token; one of this library's or a published one.
    """

    needs_entropy: ClassVar[bool] = False

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = as_loss(loss_fn)

    @property
    def rows_per_group(self) -> int:
        """``rows_per_group`` of the loss."""
        return self.loss_fn.rows_per_group

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the shifted values; ``outputs.values_or_logprobs`` float32 ``[B, S]``."""
        shifted = TokenOutputs(right_shift_values(outputs.values_or_logprobs))
        return self.loss_fn(shifted, batch, denominators)
