"""One optimizer step of a role, whatever the role is built of."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config import OptimConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.collectives import combine_metrics, reduce_metrics
from aligner.distributed.parallel import ParallelState
from aligner.errors import ConfigError, NonFiniteError
from aligner.models.gpt.forward.schedule import (
    Microbatch,
    MicroBatches,
    row_bounds,
    split_microbatches,
)
from aligner.models.gpt.forward.token_layout import LayoutRules
from aligner.models.gpt.role.optimizer_step import StepOutcome
from aligner.models.gpt.role.settings import RoleSettings
from aligner.observe.nonfinite import current_step, write_nonfinite
from aligner.types import Denominators

Optimizer = TypeVar("Optimizer")
_VALID_TOKENS = "valid_tokens"


class StepOptimizer(Protocol):
    """An optimizer with its schedule."""

    steps: int
    config: OptimConfig

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients."""
        ...

    def step(self, loss_is_finite: bool = True) -> StepOutcome:
        """Update the weights, unless the loss or the gradient is not finite."""
        ...


class BatchResult(NamedTuple):
    """Result of the passes over one global batch; the same on every rank.

    ``metrics``: reduced over all ranks, ``loss`` among them. ``valid_tokens``: how many tokens of
    the global batch count, which may be none.
    """

    metrics: dict[str, float]
    valid_tokens: float


class TrainedRole(Protocol):
    """Interface of a role that is trained."""

    role_name: str
    settings: RoleSettings
    tokenizer: Tokenizer | None
    parallel: ParallelState

    def run_batch(
        self, batch: Mapping[str, Tensor], forward_only: bool, mbs: MicroBatches | None = None
    ) -> BatchResult:
        """Passes over a global batch; they add to the gradients unless ``forward_only``.

        ``batch``: see `aligner.types`; this rank's share.
        """
        ...


def update(
    role: TrainedRole,
    optimizer: StepOptimizer | None,
    batch: Mapping[str, Tensor],
    number: int = 0,
    mbs: MicroBatches | None = None,
) -> dict[str, float]:
    """One optimizer step on one global batch; metrics plus ``grad_norm``, ``lr``, ``skipped``,
    ``empty``.

    A loss or gradient that is not finite never reaches the weights: the step is skipped or the
    run stopped (`NonFiniteError`), and the offending samples are written to disk either way.

    A global batch of which no token counts (``empty`` 1) teaches nothing: no step is taken, for
    momentum and weight decay would move the weights all the same. The schedule stays, too.

    Args: role: the role that learns. optimizer: its optimizer; `ConfigError` where it has none.
    batch: this rank's share, with the columns that the loss reads, float32 ``token_mask`` [B, S]
    and ``sample_mask`` [B] among them; see `aligner.types`. number: which mini-batch of the pass
    this is, for the report of a non-finite one. mbs: sequences per forward-backward, or the rows of
    each; default ``micro_batch_size``.
    """
    optimizer = trainable(optimizer)
    optimizer.zero_grad()
    # The passes are made on an empty batch, too: ranks meet in them, and a kept one must end.
    metrics, valid_tokens = role.run_batch(batch, forward_only=False, mbs=mbs)
    loss, empty = metrics["loss"], not valid_tokens
    outcome = StepOutcome(grad_norm=0.0, lr=optimizer.lr, skipped=False)
    if not empty:
        outcome = optimizer.step(loss_is_finite=math.isfinite(loss))
    if outcome.skipped:
        _report_non_finite(role, optimizer.steps, batch, number, loss, outcome)
    return {
        **metrics,
        "grad_norm": outcome.grad_norm,
        "lr": outcome.lr,
        "skipped": float(outcome.skipped),
        "empty": float(empty),
    }


def trainable(optimizer: Optimizer | None) -> Optimizer:
    """The optimizer; `ConfigError` where there is none."""
    if optimizer is None:
        raise ConfigError(
            "optim: this role was built without an optimizer; give it an optim section"
        )
    return optimizer


def count_denominators(
    batch: Mapping[str, Tensor], dp_group: dist.ProcessGroup
) -> tuple[Denominators, Tensor]:
    """Valid tokens and sequences of a global batch, of which ``batch`` is this rank's share.

    Also this rank's own valid tokens, a float64 scalar, for `reduce_result`.
    """
    mask = batch["token_mask"].double() * batch["sample_mask"].double()[:, None]
    own_tokens = mask.sum()
    counts = torch.stack([own_tokens, batch["sample_mask"].double().sum()])
    dist.all_reduce(counts, group=dp_group)
    tokens, seqs = counts.clamp(min=1.0).float()
    return Denominators(valid_tokens=tokens, valid_seqs=seqs), own_tokens


def reduce_result(
    parts: Iterable[Mapping[str, Tensor]], own_tokens: Tensor, dp_group: dist.ProcessGroup
) -> dict[str, float]:
    """Metrics of the micro-batches over all ranks, the count of valid tokens (`result_of`) in them.

    ``parts`` hold scalars, and ``own_tokens`` is one: this rank's count. It crosses to the host
    with the metrics: a read of its own would wait for the device.
    """
    return reduce_metrics({**combine_metrics(parts), _VALID_TOKENS: own_tokens}, dp_group)


def result_of(reduced: Mapping[str, float]) -> BatchResult:
    """Result of `reduce_result`, its parts separated."""
    metrics = dict(reduced)
    return BatchResult(valid_tokens=metrics.pop(_VALID_TOKENS), metrics=metrics)


def role_microbatches(
    batch: Mapping[str, Tensor],
    micro_batches: MicroBatches,
    settings: RoleSettings,
    parallel: ParallelState,
    *,
    in_step: bool,
) -> list[Microbatch]:
    """This rank's micro-batches of ``batch``, whose columns are [B] or [B, S, ...]
    (`aligner.types`).

    ``in_step``: every data-parallel rank gets as many as the one with most, by empty ones at the
    end, because all ranks meet in every pass. Collective then.
    """
    bounds = row_bounds(batch["input_ids"].shape[0], micro_batches)
    if in_step:
        count = torch.tensor(len(bounds), device=batch["input_ids"].device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=parallel.dp_group)
        end = bounds[-1][1]
        bounds += [(end, end)] * (int(count) - len(bounds))
    rules = LayoutRules.of(
        parallel,
        packed=settings.sequence_packing,
        sequence_length_round=settings.sequence_length_round,
    )
    return split_microbatches(batch, bounds, rules)


def _report_non_finite(
    role: TrainedRole,
    updates: int,
    batch: Mapping[str, Tensor],
    number: int,
    loss: float,
    outcome: StepOutcome,
) -> None:
    where = "nowhere (no log directory is set)"
    if role.settings.non_finite_dir is not None:
        where = str(
            write_nonfinite(
                role.settings.non_finite_dir,
                role.role_name,
                {"loss": loss, "grad_norm": outcome.grad_norm, "lr": outcome.lr},
                batch,
                _texts(role.tokenizer, batch),
                update=number,
                updates=updates,
                rank=role.parallel.rank,
            )
        )
    if role.settings.non_finite == "stop":
        raise NonFiniteError(
            f"{role.role_name}, step {current_step()}, mini-batch {number} (after {updates} "
            f"updates): loss={loss}, grad_norm={outcome.grad_norm}; samples in {where}. "
            "Lower the learning rate, or set non_finite=skip in the trainer's section to go on"
        )


def _texts(tokenizer: Tokenizer | None, batch: Mapping[str, Tensor]) -> list[str] | None:
    if tokenizer is None:
        return None
    rows = zip(batch["input_ids"].tolist(), batch["input_lengths"].tolist(), strict=True)
    return [tokenizer.decode(ids[:length]) for ids, length in rows]
