"""`RoleModel`: a role on any backend: its phases, its passes over a batch, its updates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import Weights
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.distributed.step import current_step
from aligner.errors import ConfigError, NonFiniteError
from aligner.models.gpt.forward.schedule import (
    Microbatch,
    MicroBatches,
    row_bounds,
    split_microbatches,
)
from aligner.models.gpt.forward.token_layout import LayoutRules
from aligner.models.gpt.role.optimizer_step import StepOptimizer, StepOutcome
from aligner.models.gpt.role.settings import RoleSettings
from aligner.observe.nonfinite import write_nonfinite
from aligner.parallel.collectives import combine_metrics, on_rank_zero, reduce_metrics
from aligner.parallel.groups import ParallelState
from aligner.types import Denominators, LossFunction, TokenOutputs

Optimizer = TypeVar("Optimizer")
_VALID_TOKENS = "valid_tokens"


class BatchResult(NamedTuple):
    """Result of the passes over one global batch; the same on every rank.

    ``metrics``: reduced over all ranks, ``loss`` among them. ``valid_tokens``: how many tokens of
    the global batch count, which may be none.
    """

    metrics: dict[str, float]
    valid_tokens: float


class RoleModel:
    """A role's share of a model on this process, whatever it is built of.

    A backend has the attributes declared here, and defines what raises `NotImplementedError`.
    """

    role_name = "model"  # in reports
    has_head: ClassVar[bool] = False  # of its own, in the output layer's place
    loss_fn: LossFunction | None = None  # where a call is given none
    settings: RoleSettings
    architecture: GPTArchitecture
    tokenizer: Tokenizer | None
    parallel: ParallelState
    model: nn.Module  # with what wraps it for training
    optimizer: StepOptimizer | None  # None before `setup_training`, or where it does not learn

    # What a role computes ---------------------------------------------------------------------

    def token_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """The role's outputs for each token, from ``model``'s float final hidden states.

        ``hidden``: ``[n, L, H]`` of megatron-core, ``[n * L, H]`` of a transformers model, inside
        whose forward pass this is called.
        """
        raise NotImplementedError

    def loss_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """Outputs for each token that ``loss_fn`` reads; ``hidden`` as in `token_outputs`."""
        return self.token_outputs(model, hidden, microbatch, loss_fn.needs_entropy)

    # Learning ---------------------------------------------------------------------------------

    def get_loss_and_metrics(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: LossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Loss and metrics of one global batch, of which ``batch`` is this rank's share.

        ``batch`` has the columns that the loss reads, float32 ``token_mask`` ``[B, S]`` and
        ``sample_mask`` ``[B]`` among them; see `aligner.types`. Unless ``forward_only``, gradients
        are added to the gradient buffers. ``loss_fn``: default the role's own.
        """
        metrics = self.run_batch(batch, forward_only, loss_fn, mbs).metrics
        return metrics["loss"], metrics

    def training_update(
        self,
        batch: Mapping[str, Tensor],
        number: int = 0,
        loss_fn: LossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> dict[str, float]:
        """One optimizer step on one global batch.

        Returns metrics plus ``grad_norm``, ``lr``, ``skipped``, ``empty``.

        A loss or gradient that is not finite never reaches the weights: the step is skipped or the
        run stopped (`NonFiniteError`), and the offending samples are written to disk either way.

        A global batch of which no token counts (``empty`` 1) teaches nothing: no step is taken, for
        momentum and weight decay would move the weights all the same. The schedule stays, too.

        Args:
            batch: see `get_loss_and_metrics`.
            number: which mini-batch of the pass this is, for the report of a non-finite one.
            loss_fn: default the role's own.
            mbs: sequences per forward-backward, or the rows of each; default ``micro_batch_size``.
        """
        optimizer = trainable(self.optimizer)
        optimizer.zero_grad()
        # The passes are made on an empty batch, too: ranks meet in them, and a reused one must end.
        metrics, valid_tokens = self.run_batch(batch, False, loss_fn, mbs)
        loss, empty = metrics["loss"], not valid_tokens
        outcome = StepOutcome(grad_norm=0.0, lr=optimizer.lr, skipped=False)
        if not empty:
            outcome = optimizer.step(loss_is_finite=math.isfinite(loss))
        if outcome.skipped:
            _report_non_finite(self, optimizer.steps, batch, number, loss, outcome)
        return {
            **metrics,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.lr,
            "skipped": float(outcome.skipped),
            "empty": float(empty),
        }

    @property
    def shares_prefixes(self) -> bool:
        """Sharing of what sequences begin with in common; not where each row drops its own."""
        return self.settings.shared_prefixes and not self.drops_out

    @property
    def drops_out(self) -> bool:
        """True if training leaves out parts of hidden states or of attention at random."""
        configured = self.settings.dropout
        if configured is not None:
            return configured > 0
        return max(self.architecture.hidden_dropout, self.architecture.attention_dropout) > 0

    @property
    def ranks_meet(self) -> bool:
        """True if data-parallel ranks meet in every pass, as their experts do."""
        return self.settings.parallel.expert > 1

    @cached_property
    def layout_rules(self) -> LayoutRules:
        """Rules for the layout of its micro-batches."""
        return LayoutRules.of(
            self.parallel,
            packed=self.settings.sequence_packing,
            sequence_length_round=self.settings.sequence_length_round,
            shared_prefixes=self.shares_prefixes,
        )

    def split(self, batch: Mapping[str, Tensor], micro_batches: MicroBatches) -> list[Microbatch]:
        """This rank's micro-batches of ``batch``, of the columns in `aligner.types`.

        ``batch``: columns [B] or [B, S, ...]. Where ranks meet in every pass, each gets as many as
        the one with most, by empty ones at the end. Collective then.
        """
        bounds = row_bounds(batch["input_ids"].shape[0], micro_batches)
        if self.ranks_meet:
            count = torch.tensor(len(bounds), device=batch["input_ids"].device)
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.parallel.dp_group)
            end = bounds[-1][1]
            bounds += [(end, end)] * (int(count) - len(bounds))
        return split_microbatches(batch, bounds, self.layout_rules)

    def loss_of_call(self, loss_fn: LossFunction | None) -> LossFunction:
        """The loss that a call is given, else the role's own; `ConfigError` without either."""
        loss_fn = loss_fn or self.loss_fn
        if loss_fn is None:
            raise ConfigError(f"loss_fn: the {self.role_name} has none of its own; give one")
        return loss_fn

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: LossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> BatchResult:
        """Passes over ``batch``; arguments as in `get_loss_and_metrics`.

        Denominators are counted over all data-parallel ranks before the first micro-batch, so
        neither the loss nor its gradient depends on micro-batch size or layout.
        """
        raise NotImplementedError

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: Any = None,
    ) -> Tensor:
        """The role's outputs for each token, without gradients.

        Args:
            batch: ``input_ids`` ``[B, S]``, ``input_lengths`` ``[B]`` and what the role reads.
            micro_batches: sequences per forward pass, or the rows of each pass (without gaps);
                default ``forward_micro_batch_size``.
            model: the backend's, whose outputs are wanted; default this role's own.

        Returns:
            float32 ``[B, S]`` (``[B, S, K]`` of a head with K outputs) on every process of the
            model-parallel group; 0 beyond a sequence's length.
        """
        raise NotImplementedError

    # Phases -----------------------------------------------------------------------------------

    def setup_training(self) -> None:
        """Make the optimizer; call once, after the weights are loaded."""
        raise NotImplementedError

    def prepare_for_training(self) -> None:
        """Bring the optimizer state back, or make the optimizer, and enter training mode."""
        self.setup_training()
        trainable(self.optimizer).restore()
        self.model.train()

    def finish_training(self) -> None:
        """End training; the next phase moves weights and optimizer state."""
        self.collect_weights()

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode; gradients and moments leave the device where configured."""
        self.drop_reused_forward()
        self.collect_weights()
        if self.optimizer is not None and self.settings.offload_gradients:
            self.optimizer.park_gradients()
        if self.optimizer is not None and self.settings.offload_adam_states:
            self.optimizer.offload()
        self.model.eval()

    def finish_inference(self) -> None:
        """Memory that inference cached goes to the processes that share the device."""
        accelerator.release_shared_memory()

    def collect_weights(self) -> None:
        """Make weights whole and new on every rank, where an update leaves that to forward passes;
        collective.
        """

    def drop_reused_forward(self) -> None:
        """Free what a scoring pass left for training, where one did."""

    def release_generator(self) -> None:
        """Free what sampling keeps on the device between rollouts, where it does."""

    # State ------------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        """This process's share of weights and optimizer, exact."""
        raise NotImplementedError

    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `run_state`, from the shares of all processes of the run that was saved."""
        raise NotImplementedError

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo`. Call it on every rank. Rank 0 writes, and if it cannot, all raise."""
        self.write_nemo(save_path)

    def write_nemo(self, path: str) -> None:
        """See `save_to`."""
        weights = self.whole_weights()
        files = self.tokenizer.files() if self.tokenizer is not None else {}
        keys, artifacts = self.nemo_keys(), self.nemo_artifacts()
        on_rank_zero(
            lambda: save_nemo(
                path, weights, self.architecture, files, extra_config=keys, artifacts=artifacts
            )
        )

    def nemo_keys(self) -> dict[str, Any]:
        """Keys that a role adds to the `.nemo`'s ``model_config.yaml``."""
        return {}

    def nemo_artifacts(self) -> dict[str, Path]:
        """Further files of the `.nemo`, by the key of ``model_config.yaml`` that names them."""
        return {}

    def whole_weights(self) -> dict[str, Tensor]:
        """Canonical weights joined on rank 0, none elsewhere; call it on every rank.

        Adapters are merged into them.
        """
        raise NotImplementedError

    def load_whole_weights(self, weights: Weights, strict: bool = True) -> None:
        """Inverse of `whole_weights`: this process's share of canonical weights, on every rank.

        ``weights``: whole tensors, [out, in] or [out], in any float dtype. ``strict=False`` keeps
        the head that is there where ``weights`` bring none that fits.
        """
        raise NotImplementedError

    def save_adapters(self, path: str | Path) -> None:
        """Write only the adapters, and a head; on every rank."""
        raise NotImplementedError

    def load_adapters(self, path: str | Path) -> None:
        """Take adapters, and a head, that `save_adapters` wrote; on every rank."""
        raise NotImplementedError

    def num_parameters(self) -> int:
        """Parameters on this process."""
        raise NotImplementedError


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

    ``parts`` hold scalars of any dtype, and ``own_tokens`` is one: this rank's count. It crosses to
    the host with the metrics: a read of its own would wait for the device.
    """
    return reduce_metrics({**combine_metrics(parts), _VALID_TOKENS: own_tokens}, dp_group)


def result_of(reduced: Mapping[str, float]) -> BatchResult:
    """Result of `reduce_result`, its parts separated."""
    metrics = dict(reduced)
    return BatchResult(valid_tokens=metrics.pop(_VALID_TOKENS), metrics=metrics)


def _report_non_finite(
    role: RoleModel,
    updates: int,
    batch: Mapping[str, Tensor],
    number: int,
    loss: float,
    outcome: StepOutcome,
) -> None:
    where = "nowhere (no log directory is set)"
    if role.settings.non_finite_dir is not None:
        texts = None
        if role.tokenizer is not None:
            rows = zip(batch["input_ids"].tolist(), batch["input_lengths"].tolist(), strict=True)
            texts = [role.tokenizer.decode(ids[:length]) for ids, length in rows]
        where = str(
            write_nonfinite(
                role.settings.non_finite_dir,
                role.role_name,
                {"loss": loss, "grad_norm": outcome.grad_norm, "lr": outcome.lr},
                batch,
                texts,
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
