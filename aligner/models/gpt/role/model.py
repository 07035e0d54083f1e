"""`RoleModel`: base class of the roles, with their phases, passes over batches, and updates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import Adapters, save_adapters, tensors_to_continue
from aligner.checkpoint.canonical import Weights
from aligner.checkpoint.model_source import ModelSource
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.errors import ConfigError, NonFiniteError, current_step
from aligner.losses.interfaces import AnyLossFunction, PublishedLoss
from aligner.models.gpt.forward.schedule import (
    Head,
    Microbatch,
    MicroBatches,
    row_bounds,
    split_microbatches,
)
from aligner.models.gpt.forward.token_layout import LayoutRules
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import StepOptimizer, StepOutcome
from aligner.observe.nonfinite import write_nonfinite
from aligner.parallel.collectives import on_rank_zero
from aligner.parallel.groups import ParallelState
from aligner.types import LossFunction, TokenOutputs

Optimizer = TypeVar("Optimizer")


class RoleModel(ABC):
    """One process's shards of a role's model, on any backend."""

    role_name = "model"  # in reports
    backend: ClassVar[str] = "megatron"
    loss_fn: LossFunction | None = None  # loss of calls that pass no loss
    settings: RoleSettings
    architecture: GPTArchitecture
    tokenizer: Tokenizer | None
    parallel: ParallelState
    model: nn.Module  # including wrappers for training
    optimizer: StepOptimizer | None  # None before `setup_training` and for frozen roles
    has_fresh_adapters: bool  # the adapters are new, and thus have no effect

    @property
    @abstractmethod
    def unwrapped(self) -> nn.Module:
        """`model` without wrappers for training."""

    # Outputs ----------------------------------------------------------------------------------

    @property
    def head_outputs(self) -> int:
        """Number of outputs that a head computes for each token, 0 without a head."""
        return 0

    @abstractmethod
    def token_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Compute the role's outputs for each token of a micro-batch.

        ``hidden``: final hidden states, float ``[n, L, H]`` from megatron-core or ``[n * L, H]``
        from transformers. ``with_entropy``: also compute entropies. Only a policy has entropies.
        """

    def loss_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """Compute the outputs that ``loss_fn`` reads. ``hidden``: see `token_outputs`."""
        return self.token_outputs(model, hidden, microbatch, loss_fn.needs_entropy)

    # Learning ---------------------------------------------------------------------------------

    def get_loss_and_metrics(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: AnyLossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Compute loss and metrics of a global batch, and gradients unless ``forward_only``.

        ``batch``: this rank's rows of the global batch, with the columns that the loss reads
        (`aligner.types`), including float32 ``token_mask`` ``[B, S]`` and ``sample_mask`` ``[B]``.
        For the other arguments see `training_update`.
        """
        metrics = self.run_batch(batch, forward_only, loss_fn, mbs)
        del metrics["valid_tokens"]
        return metrics["loss"], metrics

    def training_update(
        self,
        batch: Mapping[str, Tensor],
        number: int = 0,
        loss_fn: AnyLossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on one global batch.

        Returns the metrics of the loss, and ``grad_norm``, ``lr``, ``skipped`` and ``empty``.

        If the loss or the gradient is not finite, the weights do not change and the samples are
        written to disk. Then the run continues, or `NonFiniteError` is raised (``non_finite``). A
        global batch without a valid token (``empty`` is 1) changes neither weights nor schedule.

        Args:
            batch: see `get_loss_and_metrics`.
            number: index of the mini-batch in the epoch, for the report of a non-finite loss.
            loss_fn: loss to minimise. Default: the role's loss.
            mbs: number of sequences per micro-batch, or the row range of each micro-batch.
                Default: ``micro_batch_size``.
        """
        optimizer = require_optimizer(self.optimizer)
        optimizer.zero_grad()
        # An empty batch is run too, for the collectives, and to consume a reused forward pass.
        metrics = self.run_batch(batch, False, loss_fn, mbs)
        loss, empty = metrics["loss"], not metrics.pop("valid_tokens")
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
        """True if shared prefixes are computed once. False with dropout, which differs per row."""
        return self.settings.shared_prefixes and not self.drops_out

    @property
    def drops_out(self) -> bool:
        """True if training applies dropout to hidden states or attention."""
        configured = self.settings.dropout
        if configured is not None:
            return configured > 0
        return max(self.architecture.hidden_dropout, self.architecture.attention_dropout) > 0

    @property
    def passes_are_collective(self) -> bool:
        """True if every pass contains a data-parallel collective (expert parallelism)."""
        return self.settings.parallel.expert > 1

    @cached_property
    def layout_rules(self) -> LayoutRules:
        """Rules for the layout of micro-batches."""
        return LayoutRules.of(
            self.parallel,
            packed=self.settings.sequence_packing is True,
            sequence_length_round=self.settings.sequence_length_round,
            shared_prefixes=self.shares_prefixes,
        )

    def split(self, batch: Mapping[str, Tensor], micro_batches: MicroBatches) -> list[Microbatch]:
        """Split this rank's ``batch``, [B] or [B, S, ...] columns, into micro-batches.

        If `passes_are_collective`, ranks with fewer micro-batches than others get empty ones.
        """
        bounds = row_bounds(batch["input_ids"].shape[0], micro_batches)
        if self.passes_are_collective:
            count = torch.tensor(len(bounds), device=batch["input_ids"].device)
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.parallel.dp_group)
            end = bounds[-1][1]
            bounds += [(end, end)] * (int(count) - len(bounds))
        return split_microbatches(batch, bounds, self.layout_rules)

    def require_loss(self, loss_fn: AnyLossFunction | None) -> LossFunction:
        """Return ``loss_fn``, or the role's loss if it is None. Raises `ConfigError` without both.

        A loss of NeMo-RL's interface is wrapped in `PublishedLoss`.
        """
        loss_fn = loss_fn or self.loss_fn
        if loss_fn is None:
            raise ConfigError(f"loss_fn: the {self.role_name} has no default loss. Pass loss_fn")
        return loss_fn if isinstance(loss_fn, LossFunction) else PublishedLoss(loss_fn)

    @abstractmethod
    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: AnyLossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> dict[str, float]:
        """Run forward and backward passes over ``batch`` (see `get_loss_and_metrics`).

        Returns the metrics over all ranks, with ``loss`` and the global count ``valid_tokens``.
        Means divide by counts over all data-parallel ranks. Loss and gradient therefore do not
        depend on micro-batch size or layout.
        """

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: Any = None,
    ) -> Tensor:
        """Compute the role's outputs for each token, without gradients.

        Args:
            batch: ``input_ids`` ``[B, S]``, ``input_lengths`` ``[B]`` and the columns that the role
                reads.
            micro_batches: number of sequences per micro-batch, or the row range of each
                micro-batch. Default: ``forward_micro_batch_size``.
            model: model that computes the hidden states. Default: this role's model.

        Returns:
            float32 ``[B, S]`` (``[B, S, K]`` for a head with K outputs) on every process of the
            model-parallel group, 0 beyond a sequence's length.
        """
        model = model or self.unwrapped

        def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor]:
            return (self.token_outputs(model, hidden, microbatch, False).values_or_logprobs,)

        frame = self.empty_frame(batch)
        self.infer_frames(batch, head, [frame], micro_batches, model)
        return frame

    def empty_frame(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return zeros shaped as the result of `infer_tokens`, float32 [B, S] or [B, S, K]."""
        ids, outputs = batch["input_ids"], self.head_outputs
        shape = ids.shape if outputs < 2 else (*ids.shape, outputs)
        return torch.zeros(shape, device=ids.device)

    @abstractmethod
    def infer_frames(
        self,
        batch: Mapping[str, Tensor],
        head: Head,
        frames: Sequence[Tensor],
        micro_batches: MicroBatches | None = None,
        model: Any = None,
    ) -> None:
        """Run the model without gradients, and write the outputs of ``head`` to ``frames``.

        ``head``: function of hidden states and a micro-batch. Returns a tensor ``[b, s, ...]`` for
        each of the ``frames``, ``[B, S, ...]``. For the other arguments see `infer_tokens`.
        """

    # Phases -----------------------------------------------------------------------------------

    @abstractmethod
    def setup_training(self) -> None:
        """Create the optimizer, if there is none yet, after the weights are loaded."""

    def prepare_for_training(self) -> None:
        """Create the optimizer or move its state to the device, and enter training mode."""
        self.setup_training()
        require_optimizer(self.optimizer).restore()
        self.model.train()

    def finish_training(self) -> None:
        """End training, and collect the weights (see `collect_weights`)."""
        self.collect_weights()

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode, and move gradients and moments off the device if configured."""
        self.drop_reused_forward()
        self.collect_weights()
        if self.optimizer is not None and self.settings.offload_gradients:
            self.optimizer.park_gradients()
        if self.optimizer is not None and self.settings.offload_adam_states:
            self.optimizer.offload()
        self.model.eval()

    def finish_inference(self) -> None:
        """Free the memory that inference cached, for other processes on the device."""
        accelerator.release_shared_memory()

    def collect_weights(self) -> None:
        """Gather weights that other ranks updated, unless steps do. All ranks must call this."""
        if self.optimizer is not None:
            self.optimizer.collect_weights()

    def drop_reused_forward(self) -> None:  # noqa: B027 - optional for a backend
        """Free the autograd graph that a scoring pass kept for training, if any."""

    def release_generator(self) -> None:  # noqa: B027 - optional for a role
        """Free the memory that sampling keeps on the device between rollouts, if any."""

    # State ------------------------------------------------------------------------------------

    @classmethod
    def settings_for(cls, checkpoint: ModelSource, settings: RoleSettings) -> RoleSettings:
        """Return ``settings`` with the values that the role reads from the checkpoint."""
        del checkpoint
        return settings

    def read_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - optional for a role
        """Read the role's keys in ``model_config.yaml`` (see `nemo_keys`)."""

    @abstractmethod
    def run_state(self) -> dict[str, Any]:
        """Return this process's shards of weights and optimizer state."""

    @abstractmethod
    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this process's shards. ``states``: each saving rank's `run_state`, in order."""

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo` file. Call it on every rank: rank 0 writes, and all raise its error."""
        # All ranks gather the weights, rank 0 writes.
        weights = self.whole_weights()
        files = self.tokenizer.files() if self.tokenizer is not None else {}
        keys, artifacts = self.nemo_keys(), self.nemo_artifacts()
        on_rank_zero(
            lambda: save_nemo(save_path, weights, self.architecture, files, keys, artifacts)
        )

    def nemo_keys(self) -> dict[str, Any]:
        """Return the keys that the role adds to ``model_config.yaml`` in a `.nemo` file."""
        return {}

    def nemo_artifacts(self) -> dict[str, Path]:
        """Return additional files for the `.nemo` file, by their key in ``model_config.yaml``."""
        return {}

    @abstractmethod
    def whole_weights(self) -> dict[str, Tensor]:
        """Gather canonical weights, with adapters merged, on rank 0. Call it on every rank."""

    @abstractmethod
    def load_whole_weights(self, weights: Weights, strict: bool = True) -> None:
        """Load this process's shards from canonical weights, [out, in]. Call it on every rank.

        ``strict=False``: a head keeps its values if ``weights`` do not contain it in its shape.
        """

    def save_adapters(self, path: str | Path) -> None:
        """Write only the adapters and the head. Call it on every rank."""
        lora, tensors, keys = self.settings.lora, self.gather_adapters(), self.nemo_keys()
        assert lora is not None
        on_rank_zero(lambda: save_adapters(path, Adapters(lora, tensors, keys)))

    def load_adapters(self, path: str | Path) -> None:
        """Load adapters and head from a file of `save_adapters`. Call it on every rank."""
        lora, has_head = self.settings.lora, self.head_outputs > 0
        assert lora is not None
        self.fill_adapters(tensors_to_continue(path, self.architecture, lora, has_head))
        self.has_fresh_adapters = False

    @abstractmethod
    def gather_adapters(self) -> dict[str, Tensor]:
        """Gather adapters and head, [out, in] each, on rank 0. Call it on every rank."""

    @abstractmethod
    def fill_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this process's shards of adapters and head from ``tensors``, [out, in] each."""

    def way_in_words(self) -> str:
        """Describe packing, attention and decoder, or return "" if the model's type fixes them."""
        return ""

    @abstractmethod
    def num_parameters(self) -> int:
        """Count the parameters on this process."""


class ValueModel(RoleModel):
    """A critic or reward model, whose head computes outputs for each token."""

    # True: the output at token t is column t + 1 of results (critic). False: it is column t.
    right_shift: ClassVar[bool] = True

    @property
    def head_outputs(self) -> int:
        """Number of outputs that the head computes for each token."""
        return 1

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Compute values, float32 ``[B, S]``. Column t is the value of the tokens before token t.

        Values are 0 for the first token and beyond a sequence's length. ``batch``: ``input_ids``
        int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``. ``micro_batches``: see
        `RoleModel.infer_tokens`.
        """
        return self.infer_tokens(batch, micro_batches)


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer, or raise `ConfigError` if it is None."""
    if optimizer is None:
        raise ConfigError("optim: this role was built without an optimizer. Add a section optim")
    return optimizer


def _report_non_finite(
    role: RoleModel,
    updates: int,
    batch: Mapping[str, Tensor],
    number: int,
    loss: float,
    outcome: StepOutcome,
) -> None:
    """Write the samples of a skipped update to disk, and raise if ``non_finite`` is ``stop``."""
    location = "not written (no log directory is set)"
    # The report contains the samples as text if the role knows a tokenizer.
    if role.settings.non_finite_dir is not None:
        texts = None
        if role.tokenizer is not None:
            rows = zip(batch["input_ids"].tolist(), batch["input_lengths"].tolist(), strict=True)
            texts = [role.tokenizer.decode(ids[:length]) for ids, length in rows]
        location = str(
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
            f"updates): loss={loss}, grad_norm={outcome.grad_norm}. Samples: {location}. Lower the "
            "learning rate, or set non_finite=skip in the trainer's section to continue"
        )
