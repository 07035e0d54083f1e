"""NeMo-RL's published interface of losses, adapted to the roles of this library.

A published loss is any callable ``(input, data, global_valid_seqs, global_valid_toks)`` that
returns ``(loss, metrics)``. `PublishedLoss` converts it to an `aligner.types.LossFunction`.
"""

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner import types
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import AlignerError, ConfigError, DataError, raised_as
from aligner.types import Denominators, TokenOutputs

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Any]]]
AnyLossFunction = types.LossFunction | LossFunction
_SHARED_PARAMETERS = ("data", "global_valid_seqs", "global_valid_toks")


class LossInputType(enum.Enum):
    """Kind of the first input of a published loss.

    ``LOGIT``: a policy's logits divided by the sampling temperature, float32 ``[B, S, V]``, at
    position t those of token t + 1, or a critic's values ``[B, S]``. ``LOGPROB``: a policy's
    log-probs, float32 ``[B, S - 1]``, at position t that of token t + 1, or 0 if the token is
    masked.
    """

    LOGIT = "logit"
    LOGPROB = "logprob"


@dataclass(frozen=True)
class PublishedLoss:
    """Adapter of a published loss to `aligner.types.LossFunction`.

    ``data`` contains the columns of a micro-batch, cut to the longest row. ``global_valid_seqs``
    and ``global_valid_toks`` are float32 scalars of the global batch: ``sum(sample_mask)`` and
    ``sum(token_mask * sample_mask)``, at least 1. Losses and metrics are summed over micro-batches
    and ranks, so the function must divide by one of them. Names ending in ``_min`` or ``_max`` are
    combined by minimum or maximum.

    If the signature contains ``data``, ``global_valid_seqs`` and ``global_valid_toks``, the
    remaining parameter receives the input and all arguments are keywords. Otherwise they are
    positional.
    """

    function: LossFunction
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"loss_fn={self.function!r} is not callable. Give a function of (logits, data, "
                "global_valid_seqs, global_valid_toks), or a loss of aligner.algorithms.losses"
            )
        _ = self.input_type  # refuses an input that no role can provide

    @property
    def rows_per_group(self) -> int:
        """Number of adjacent rows that the function compares (its ``rows_per_group``, or 1)."""
        return int(getattr(self.function, "rows_per_group", 1))

    @property
    def input_type(self) -> LossInputType:
        """Kind of input, by the function's ``input_type`` or its parameter's name, or ``LOGIT``."""
        declared = getattr(self.function, "input_type", None)
        if declared is None:
            is_logprob = self._input_name() == "next_token_logprobs"
            return LossInputType.LOGPROB if is_logprob else LossInputType.LOGIT
        names = ", ".join(kind.name for kind in LossInputType)
        remedy = f"use one of {names}, or aligner.losses.distillation for distillation"
        with raised_as(ConfigError, f"loss_fn.input_type={declared}", ValueError, remedy=remedy):
            # The enumeration of another library uses the same values.
            return LossInputType(getattr(declared, "value", declared))

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the function on logits, values or log-probs ``[B, S]`` of one micro-batch."""
        model_output = outputs.values_or_logprobs
        if self.input_type is LossInputType.LOGPROB:
            model_output = model_output[:, 1:]
        arguments = {
            "data": BatchedDataDict(batch),
            "global_valid_seqs": denominators.valid_seqs,
            "global_valid_toks": denominators.valid_tokens,
        }
        name = self._input_name()
        if name is None:
            result = self.function(model_output, *arguments.values())
        else:
            result = self.function(**{name: model_output}, **arguments)
        return loss_and_metrics(result, "loss_fn", DataError)

    def _input_name(self) -> str | None:
        """Return the name of the input's parameter, or None if arguments are positional."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a function written in C
            return None
        if any(name not in parameters for name in _SHARED_PARAMETERS):
            return None
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                declared = getattr(self.function, "input_type", LossInputType.LOGIT)
                is_logprob = getattr(declared, "value", declared) == LossInputType.LOGPROB.value
                return "next_token_logprobs" if is_logprob else "logits"
            if name not in _SHARED_PARAMETERS:
                return None if parameter.kind is parameter.POSITIONAL_ONLY else name
        return None


def to_loss_function(loss: AnyLossFunction) -> types.LossFunction:
    """Return ``loss`` with this library's interface: unchanged, or a published loss adapted."""
    return loss if isinstance(loss, types.LossFunction) else PublishedLoss(loss)


def loss_and_metrics(
    result: Any, who: str, error: type[AlignerError]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Check a loss function's ``result`` and return a scalar loss and detached float32 scalars.

    ``error``: class raised for any other result. The message begins with ``who``.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise error(
            f"{who} returned a {type(result).__name__}. Return a pair of the loss and a mapping "
            "of metrics"
        )
    loss, metrics = result
    # The loss must be a scalar tensor. Numbers have no gradient.
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise error(f"{who} returned {shape} as the loss. Return a scalar tensor")
    scalars: dict[str, Tensor] = {}
    for name, value in metrics.items():
        text = f"{who}: metric {name}={value!r} is not a number"
        with raised_as(error, text, TypeError, ValueError, RuntimeError, remedy="return scalars"):
            scalar = torch.as_tensor(value, dtype=torch.float32, device=loss.device).detach()
            if scalar.ndim:
                raise ValueError(f"its shape is {list(scalar.shape)}")
        scalars[str(name)] = scalar
    return loss, scalars
