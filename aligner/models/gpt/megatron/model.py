"""`MegatronGPTModel`: a megatron-core GPT as a LightningModule and a NeMo `ModelPT`.

It owns what every role shares: building this process's share of the model, its optimizer, moving
between phases, and `.nemo` files. What a role computes from the hidden states is the role's.

Training may go on with a scoring pass (`ForwardReuse`). Where a rollout is one micro-batch of one
update, the critic's values and the first forward pass of its training read the same rows with the
same weights. Then the values' pass keeps its graph:

    get_values ─► hidden states with their graph ─► values
                              │
    training_update ──────────┴─► loss ─► backward
"""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from nemo.core.classes import ModelPT
from nemo.utils import logging
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapter_shapes
from aligner.checkpoint.model_source import ModelSource
from aligner.checkpoint.nemo.config import architecture_from_config
from aligner.checkpoint.nemo.connector import GPTSaveRestoreConnector
from aligner.config import TrainedModelConfig, as_omegaconf, check_layout
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.models.gpt.forward.schedule import (
    ForwardStep,
    Head,
    Microbatch,
    MicroBatches,
    forward_step,
    infer_microbatches,
    loss_head,
    run_microbatches,
)
from aligner.models.gpt.lora import RoleAdapters
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.megatron.optimizer import RoleOptimizer, wrap_for_training
from aligner.models.gpt.megatron.state import RoleWeights
from aligner.models.gpt.role.model import (
    BatchResult,
    count_denominators,
    reduce_result,
    result_of,
)
from aligner.models.gpt.role.settings import RoleSettings, SectionType, settings_beside_architecture
from aligner.parallel.collectives import broadcast_floats
from aligner.parallel.groups import ParallelState, initialize_parallel
from aligner.types import Denominators, LossFunction, TokenOutputs

_OF_ROWS = ("input_ids", "input_lengths")


class ForwardReuse:
    """Hidden states of a scoring pass over one micro-batch, with their graph, for one update."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: makes the passes; none is there yet."""
        self._model = model
        self._microbatch: Microbatch | None = None
        self._versions: list[int] = []

    def keep(self, microbatch: Microbatch, hidden: Tensor) -> None:
        """Keep ``hidden`` float [n, L, H], which ``model`` made of ``microbatch``."""
        self._microbatch = dataclasses.replace(microbatch, hidden=hidden)
        self._versions = self._weight_versions()

    def drop(self) -> None:
        """Free the graph."""
        self._microbatch = None

    def take(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """``microbatches``, with hidden states where these are the rows that were scored.

        Whatever they are, nothing is left afterwards.
        """
        kept, self._microbatch = self._microbatch, None
        if kept is None or len(microbatches) != 1 or self._versions != self._weight_versions():
            return list(microbatches)
        # The same sequences, in the same order and frame?
        rows = [(kept.columns[name], microbatches[0].columns[name]) for name in _OF_ROWS]
        if not all(torch.equal(*pair) for pair in rows):
            return list(microbatches)
        return [dataclasses.replace(microbatches[0], hidden=kept.hidden)]

    def _weight_versions(self) -> list[int]:
        """Version counter of each weight, which a write increases."""
        return [parameter._version for parameter in self._model.parameters()]


class MegatronGPTModel(RoleWeights, ModelPT):
    """A role's share of a megatron-core GPT on this process.

    Args:
        cfg: the ``model_config.yaml`` of a `.nemo` file, as a mapping.
        trainer: a Lightning trainer; ours schedule themselves and pass none.
        settings: layout, precision, batch sizes, optimizer. Default: what stands in ``cfg`` beside
            the architecture (see `settings_beside_architecture`).
        architecture: parsed from ``cfg`` when not given.
        tokenizer: packaged when the model is saved.
        initialize: fill the weights at random; False when a checkpoint is about to.
    """

    config_types: ClassVar[tuple[SectionType, ...]] = (TrainedModelConfig,)  # of a run's section
    artifact_folder: tempfile.TemporaryDirectory | None = None  # files registered in the `.nemo`

    def __init__(
        self,
        cfg: Any,
        trainer: Any = None,
        *,
        settings: RoleSettings | None = None,
        architecture: GPTArchitecture | None = None,
        tokenizer: Tokenizer | None = None,
        initialize: bool = True,
    ) -> None:
        with logging.temp_verbosity(logging.ERROR):  # it misses data sections we have no use for
            super().__init__(as_omegaconf(cfg), trainer)
        self.settings = settings or settings_beside_architecture(cfg, self.config_types, trainer)
        self.tokenizer = tokenizer
        self.parallel: ParallelState = initialize_parallel(
            self.settings.parallel, seed=self.settings.seed
        )
        self.architecture = architecture or architecture_from_config(
            dict(cfg), cfg.get("vocab_size") or (tokenizer.vocab_size if tokenizer else None)
        )
        check_layout(self.architecture, self.settings.parallel, self.parallel.world_size)
        if self.settings.lora is not None:
            adapter_shapes(self.architecture, self.settings.lora)  # refuses what cannot be adapted
        with accelerator.deterministic_seed(self.settings.seed):
            self.model: nn.Module = self.build_gpt(initialize=initialize)
        self.optimizer: RoleOptimizer | None = None
        self.adapters: RoleAdapters | None = None
        if self.settings.lora is not None:
            self.adapters = RoleAdapters(
                self.gpt,
                self.architecture,
                self.parallel,
                self.settings.lora,
                seed=self.settings.seed,
                has_head=self.has_head,
            )
        self.forward_reuse = ForwardReuse(self.gpt)  # a role may score and train in one

    # What a role adds -------------------------------------------------------------------------

    def add_head(self, gpt: GPTModel) -> None:
        """Let a role replace the output layer by a head of its own."""

    def loss_step(self, loss_fn: LossFunction, denominators: Denominators) -> ForwardStep:
        """megatron-core's forward step that ends in the loss and its metrics."""
        gpt = self.gpt

        def outputs(hidden: Tensor, microbatch: Microbatch) -> TokenOutputs:
            return self.loss_outputs(gpt, hidden, microbatch, loss_fn)

        return partial(forward_step, head=loss_head(outputs, loss_fn, denominators))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the role's output for one token."""
        return ()

    # The model -------------------------------------------------------------------------------

    def build_gpt(self, initialize: bool) -> GPTModel:
        """This process's share of the architecture, with the role's head."""
        gpt = build_gpt(
            self.architecture.with_dropout(self.settings.dropout),
            dtype=self.settings.dtype,
            fp8=self.settings.fp8,
            parallel=self.settings.parallel,
            recompute=self.settings.recompute,
            lora=self.settings.lora,
            layers=self.settings.layers,
            initialize=initialize,
            pre_process=self.parallel.is_first_stage,
            post_process=self.parallel.is_last_stage,
        )
        self.add_head(gpt)
        if self.settings.freeze_moe_router:
            for name, parameter in gpt.named_parameters():
                parameter.requires_grad_(".router." not in name)
        return gpt

    def num_parameters(self) -> int:
        """Parameters on this process."""
        return sum(parameter.numel() for parameter in self.gpt.parameters())

    def setup_training(self) -> None:
        """Make gradient buffers and the optimizer; call once, after the weights are loaded."""
        if self.optimizer is not None or self.settings.optim is None:
            return
        wrapped = wrap_for_training(
            self.gpt,
            self.parallel.dp_size,
            overlap_grad_reduce=self.settings.overlap_grad_reduce,
            overlap_param_gather=self.settings.overlap_param_gather,
        )
        self.optimizer = RoleOptimizer(
            wrapped,
            self.settings.optim,
            gradient_clip_val=self.settings.gradient_clip_val,
            total_steps=self.settings.max_optimizer_steps,
        )
        self.model = wrapped

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: GPTModel | None = None,
    ) -> Tensor:
        """The role's `token_outputs` without gradients; see `RoleModel.infer_tokens`."""
        gpt = model or self.gpt

        def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor]:
            return (self.token_outputs(gpt, hidden, microbatch, False).values_or_logprobs,)

        frame = self.empty_frame(batch)
        self.infer_frames(batch, head, [frame], micro_batches, gpt)
        return frame

    def empty_frame(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Zeros of the shape that `infer_tokens` returns, float32 ``[B, S]`` or ``[B, S, K]``."""
        ids = batch["input_ids"]
        return torch.zeros((*ids.shape, *self.output_shape), device=ids.device)

    def infer_frames(
        self,
        batch: Mapping[str, Tensor],
        head: Head,
        frames: Sequence[Tensor],
        micro_batches: MicroBatches | None = None,
        gpt: GPTModel | None = None,
        *,
        with_graph: bool = False,
    ) -> None:
        """Fill ``frames`` ``[B, S, ...]`` with what ``head`` makes of hidden states.

        ``head`` returns as many tensors ``[b, s, ...]`` for a micro-batch. The frames are the same
        on every process of the model-parallel group. ``with_graph`` is that of
        `infer_microbatches`; other arguments as in `infer_tokens`.
        """
        microbatches = self.split(batch, micro_batches or self.settings.forward_micro_batch_size)
        step = partial(forward_step, head=head)
        results = infer_microbatches(gpt or self.gpt, microbatches, step, with_graph=with_graph)
        if self.parallel.is_last_stage:
            start = 0
            for parts in results:
                for frame, part in zip(frames, parts, strict=True):
                    frame[start : start + part.shape[0], : part.shape[1]] = part
                start += parts[0].shape[0]
        if self.settings.parallel.pipeline > 1:
            source = dist.get_global_rank(
                self.parallel.pp_group, self.settings.parallel.pipeline - 1
            )
            for frame in frames:
                dist.broadcast(frame, src=source, group=self.parallel.pp_group)

    # Learning ---------------------------------------------------------------------------------

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: LossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> BatchResult:
        """See `RoleModel.run_batch`."""
        loss_fn = self.loss_of_call(loss_fn)
        if self.adapters is not None and self.optimizer is not None:
            self.adapters.begin_update(self.optimizer.steps)
        denominators, own_tokens = count_denominators(batch, self.parallel.dp_group)
        step = self.loss_step(loss_fn, denominators)
        microbatches = self.split(batch, mbs or self.settings.micro_batch_size)
        if forward_only:
            results = [found for _, found in infer_microbatches(self.gpt, microbatches, step)]
        else:
            results = run_microbatches(self.model, self.forward_reuse.take(microbatches), step)
        reduced = None
        if self.parallel.is_last_stage:
            reduced = reduce_result(results, own_tokens, self.parallel.dp_group)
        last = dist.get_global_rank(self.parallel.pp_group, self.settings.parallel.pipeline - 1)
        return result_of(broadcast_floats(reduced, last, self.parallel.pp_group))

    def drop_reused_forward(self) -> None:
        """Free the graph of a scoring pass that no update took."""
        self.forward_reuse.drop()

    # NeMo's ModelPT ---------------------------------------------------------------------------

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: ModelSource,
        *,
        settings: RoleSettings | None = None,
        trainer: Any = None,
        strict: bool = True,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Self:
        """Build this role from an open model and fill its weights.

        A role with a scalar head takes the ``rm_head`` the file brings, or a fresh one. ``options``
        are the role's own arguments.
        """
        if tokenizer is None and checkpoint.tokenizer_files:
            tokenizer = checkpoint.tokenizer
        # Without settings the role's defaults: the file's own are of who trained it.
        model = cls(
            checkpoint.config,
            trainer,
            settings=cls.settings_for(checkpoint, settings or RoleSettings()),
            architecture=checkpoint.architecture,
            tokenizer=tokenizer,
            initialize=False,
            **options,
        )
        model.load_whole_weights(checkpoint.weights, strict)
        if model.adapters is not None and model.settings.adapters_path is not None:
            model.load_adapters(model.settings.adapters_path)
        model.read_config(checkpoint.config)
        return model

    @classmethod
    def settings_for(cls, checkpoint: ModelSource, settings: RoleSettings) -> RoleSettings:
        """Settings, with those that a role reads from the file where they are not given."""
        del checkpoint
        return settings

    def read_config(self, config: Mapping[str, Any]) -> None:
        """Read what a role keeps in ``model_config.yaml``; see `nemo_keys`."""

    def nemo_artifacts(self) -> dict[str, Path]:
        """Files that were registered with NeMo; ``cfg`` has their paths."""
        keys = getattr(self, "artifacts", None) or {}
        return {key: Path(functools.reduce(getitem, key.split("."), self.cfg)) for key in keys}

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo` through NeMo's connector; call it on every rank."""
        GPTSaveRestoreConnector().save_to(self, str(save_path))

    @classmethod
    def restore_from(cls, restore_path: str, *args: Any, **kwargs: Any) -> Any:
        """Restore from a `.nemo` file; NeMo's arguments, our connector by default."""
        kwargs.setdefault("save_restore_connector", GPTSaveRestoreConnector())
        return super().restore_from(restore_path, *args, **kwargs)

    @classmethod
    def list_available_models(cls) -> None:
        """None: no model is downloaded by name."""
        return

    def setup_training_data(self, train_data_config: Any) -> None:
        """Data belongs to the trainer; nothing to set up here."""

    def setup_validation_data(self, val_data_config: Any) -> None:
        """Data belongs to the trainer; nothing to set up here."""
