"""Losses with NeMo-RL's published interface, adapted to the interface of this library.

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
    """What a published loss (NeMo-RL's interface) gets as first argument.

    ``LOGIT``: for a policy logits divided by the sampling temperature, float32 ``[B, S, V]``.
    Position t predicts token t + 1. A critic passes values, float32 ``[B, S]``. ``LOGPROB``: a
    policy's log-probs, float32 ``[B, S - 1]``. Position t contains the log-prob of token t + 1, or
    0 if this token is masked.
    """

    LOGIT = "logit"
    LOGPROB = "logprob"


@dataclass(frozen=True)
class PublishedLoss:
    """Adapter from a loss with NeMo-RL's published interface to `aligner.types.LossFunction`.

    The function is called for each micro-batch with the model's output and ``data``, the columns
    of the micro-batch, cut to its longest row. ``global_valid_seqs`` and ``global_valid_toks`` are
    float32 scalars, computed over the global batch: ``sum(sample_mask)`` and
    ``sum(token_mask * sample_mask)``, at least 1. The function must divide its sums by one of the
    two, because losses and metrics are then summed over micro-batches and ranks. Metrics whose name
    ends in ``_min`` or ``_max`` are combined by minimum or maximum.

    If the signature has parameters ``data``, ``global_valid_seqs`` and ``global_valid_toks``, all
    arguments are passed as keywords, and the model's output to the first other parameter.
    Otherwise arguments are passed by position.
    """

    function: LossFunction
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"loss_fn={self.function!r} is not callable. Pass a function with the parameters "
                "(logits, data, global_valid_seqs, global_valid_toks), or a loss of aligner.losses"
            )
        _ = self.input_type  # raises ConfigError for an input that neither policy nor critic has

    @property
    def rows_per_group(self) -> int:
        """Number of adjacent rows that the loss compares: ``function.rows_per_group``, or 1."""
        return int(getattr(self.function, "rows_per_group", 1))

    @property
    def input_type(self) -> LossInputType:
        """The function's attribute ``input_type``, else a type derived from a parameter's name."""
        declared = getattr(self.function, "input_type", None)
        if declared is None:
            is_logprob = self._input_name() == "next_token_logprobs"
            return LossInputType.LOGPROB if is_logprob else LossInputType.LOGIT
        names = ", ".join(kind.name for kind in LossInputType)
        remedy = f"set input_type to one of {names}, or distil with aligner.losses.distillation"
        with raised_as(ConfigError, f"loss_fn.input_type={declared}", ValueError, remedy=remedy):
            # The enumeration of another library uses the same values.
            return LossInputType(getattr(declared, "value", declared))

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the function on logits [B, S, V], values [B, S] or log-probs [B, S]."""
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
        """Return the parameter that gets the model's output, or None to pass by position."""
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


def loss_and_metrics(
    result: Any, who: str, error: type[AlignerError]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Check the ``result`` of a user's loss function, and convert its metrics to tensors.

    Returns the loss, a scalar tensor, and metrics, detached float32 scalars. Raises ``error``,
    beginning with ``who``, unless ``result`` is a pair of a scalar tensor and a mapping of numbers.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise error(
            f"{who} returned a {type(result).__name__}. Return a tuple (loss, metrics), where "
            "metrics is a mapping from names to numbers"
        )
    loss, metrics = result
    # The loss must be a scalar tensor. Numbers have no gradient.
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
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
