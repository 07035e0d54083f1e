"""Losses as NeMo-RL publishes them, adapted to the roles of this library.

A published loss is any callable ``(input, data, global_valid_seqs, global_valid_toks)`` that
returns ``(loss, metrics)``. `as_loss` makes it an `aligner.types.LossFunction`, so that ``train``
takes either kind.
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
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.types import Denominators, TokenOutputs

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Any]]]
_GIVEN = ("data", "global_valid_seqs", "global_valid_toks")


class LossInputType(enum.Enum):
    """Input that a published loss reads first.

    ``LOGIT``: of a policy float32 ``[B, S, V]``, at position t the logits of token t + 1 over the
    sampling temperature; of a critic its values ``[B, S]``. ``LOGPROB``: of a policy float32
    ``[B, S - 1]``, at position t the log-prob of token t + 1, 0 where ``token_mask`` of that token
    is 0.
    """

    LOGIT = "logit"
    LOGPROB = "logprob"


@dataclass(frozen=True)
class PublishedLoss:
    """A published loss as one of this library's.

    ``data`` are the columns of a micro-batch, cut to its longest row. ``global_valid_seqs`` and
    ``global_valid_toks`` are float32 scalars of the global batch: ``sum(sample_mask)`` and
    ``sum(token_mask * sample_mask)``, at least 1. The losses and metrics of micro-batches and ranks
    are added up, so they are divided by one of the two; metrics that end in ``_min`` or ``_max``
    are combined so.

    The input goes to the parameter that is none of ``data``, ``global_valid_seqs`` and
    ``global_valid_toks`` where a signature has those three, in any order; else the four are
    positional.
    """

    function: LossFunction
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _ = self.input_type  # refuses what no role can give

    @property
    def rows_per_group(self) -> int:
        """``rows_per_group`` of the function, where it compares adjacent rows; else 1."""
        return int(getattr(self.function, "rows_per_group", 1))

    @property
    def input_type(self) -> LossInputType:
        """``input_type`` of the function, else by its parameter's name, else ``LOGIT``."""
        given = getattr(self.function, "input_type", None)
        if given is None:
            is_logprob = self._input_name() == "next_token_logprobs"
            return LossInputType.LOGPROB if is_logprob else LossInputType.LOGIT
        try:  # another library's enumeration has the same values
            return LossInputType(getattr(given, "value", given))
        except ValueError:
            known = ", ".join(kind.name for kind in LossInputType)
            raise ConfigError(
                f"loss_fn.input_type={given}: use one of {known}; distillation is "
                "aligner.losses.distillation"
            ) from None

    @property
    def reads_logits(self) -> bool:
        """True if a policy must give all its logits."""
        return self.input_type is LossInputType.LOGIT

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``outputs.values_or_logprobs``: logits or values, or log-probs ``[B, S]``."""
        first = outputs.values_or_logprobs
        if not self.reads_logits:
            first = first[:, 1:]
        rest = {
            "data": BatchedDataDict(batch),
            "global_valid_seqs": denominators.valid_seqs,
            "global_valid_toks": denominators.valid_tokens,
        }
        name = self._input_name()
        result = (
            self.function(first, *rest.values())
            if name is None
            else self.function(**{name: first}, **rest)
        )
        return loss_and_metrics(result, "loss_fn", DataError)

    def _input_name(self) -> str | None:
        """The parameter of the input, where all four are passed by name."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a function of C
            return None
        if any(name not in parameters for name in _GIVEN):
            return None
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given = getattr(self.function, "input_type", LossInputType.LOGIT)
                is_logprob = getattr(given, "value", given) == LossInputType.LOGPROB.value
                return "next_token_logprobs" if is_logprob else "logits"
            if name not in _GIVEN:
                return None if parameter.kind is parameter.POSITIONAL_ONLY else name
        return None


def as_loss(loss_fn: Any) -> types.LossFunction:
    """``loss_fn`` itself where it is one of this library's; a published one as `PublishedLoss`."""
    if hasattr(loss_fn, "needs_entropy") and hasattr(loss_fn, "rows_per_group"):
        return loss_fn
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn={loss_fn!r}: give a function of (logits, data, global_valid_seqs, "
            "global_valid_toks), or one of aligner.algorithms.losses"
        )
    return PublishedLoss(loss_fn)


def reads_logits(loss_fn: types.LossFunction) -> bool:
    """Return whether a policy must give ``loss_fn`` all its logits."""
    return isinstance(loss_fn, PublishedLoss) and loss_fn.reads_logits


def loss_and_metrics(
    result: Any, who: str, error: type[AlignerError]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss function's ``result`` as a scalar loss and detached float32 scalars.

    ``error``: raised where it is something else; the message begins with ``who``.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise error(
            f"{who} returned a {type(result).__name__}; return a pair of the loss and a mapping "
            "of metrics"
        )
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise error(f"{who} returned {shape} as the loss; return a scalar tensor")
    return loss, {str(key): metric_tensor(key, value, loss) for key, value in metrics.items()}


def metric_tensor(name: str, value: Any, loss: Tensor) -> Tensor:
    """``value`` as a detached float32 scalar beside ``loss``; `DataError` where it is no number."""
    try:
        number = torch.as_tensor(value, dtype=torch.float32, device=loss.device).detach()
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number.ndim:
        raise DataError(f"loss_fn: metric {name}={value!r} is no number; return only scalars")
    return number
