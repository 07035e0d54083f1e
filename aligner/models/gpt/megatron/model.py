"""`MegatronGPTModel`: a megatron-core GPT as a LightningModule and a NeMo `ModelPT`."""

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
from aligner.losses.interfaces import AnyLossFunction
from aligner.models.gpt.forward import schedule
from aligner.models.gpt.lora import RoleAdapters
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.megatron.optimizer import RoleOptimizer, wrap_for_training
from aligner.models.gpt.megatron.state import RoleWeights
from aligner.models.gpt.role.settings import RoleSettings, SectionType, settings_from_model_config
from aligner.parallel.collectives import broadcast_floats, count_denominators, reduce_result
from aligner.parallel.groups import ParallelState, initialize_parallel
from aligner.types import Denominators, LossFunction

_ROW_COLUMNS = ("input_ids", "input_lengths")


class ForwardReuse:
    """Stores the forward pass that computed a critic's values, for reuse by the next update.

    If a rollout is a single micro-batch, the critic's values and its first forward pass in training
    have the same rows and weights. The stored hidden states therefore keep their autograd graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._microbatch: schedule.Microbatch | None = None
        self._versions: list[int] = []

    def keep(self, microbatch: schedule.Microbatch, hidden: Tensor) -> None:
        """Store ``hidden``, float [n, L, H], the model's output for ``microbatch``."""
        self._microbatch = dataclasses.replace(microbatch, hidden=hidden)
        self._versions = self._weight_versions()

    def drop(self) -> None:
        """Free the stored hidden states and their graph."""
        self._microbatch = None

    def take(self, microbatches: Sequence[schedule.Microbatch]) -> list[schedule.Microbatch]:
        """Return ``microbatches``, with the stored hidden states if rows and weights are the same.

        This object drops the stored hidden states in either case.
        """
        scored, self._microbatch = self._microbatch, None
        if scored is None or len(microbatches) != 1 or self._versions != self._weight_versions():
            return list(microbatches)
        # Compare the sequences, their order and their padding.
        rows = [(scored.columns[name], microbatches[0].columns[name]) for name in _ROW_COLUMNS]
        if not all(torch.equal(*pair) for pair in rows):
            return list(microbatches)
        return [dataclasses.replace(microbatches[0], hidden=scored.hidden)]

    def _weight_versions(self) -> list[int]:
        """Return the version counter of each weight, which every write increments."""
        return [parameter._version for parameter in self._model.parameters()]


class MegatronGPTModel(RoleWeights, ModelPT):
    """One process's shard of a role's megatron-core model.

    Args:
        cfg: the ``model_config.yaml`` of a `.nemo` file, as a mapping.
        trainer: Lightning trainer (optional).
        settings: layout, precision, batch sizes, optimizer. Default: read from ``cfg``
            (`settings_from_model_config`).
        architecture: shape of the model. Default: parsed from ``cfg``.
        tokenizer: tokenizer that is saved with the model.
        initialize: initialise the weights at random. False if a checkpoint is loaded next.
    """

    config_types: ClassVar[tuple[SectionType, ...]] = (TrainedModelConfig,)  # of its section
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
        with logging.temp_verbosity(logging.ERROR):  # NeMo warns about unused data sections
            super().__init__(as_omegaconf(cfg), trainer)
        # Settings, layout and architecture.
        self.settings = settings or settings_from_model_config(cfg, self.config_types, trainer)
        self.tokenizer = tokenizer
        self.parallel: ParallelState = initialize_parallel(
            self.settings.parallel, seed=self.settings.seed
        )
        self.architecture = architecture or architecture_from_config(
            dict(cfg), cfg.get("vocab_size") or (tokenizer.vocab_size if tokenizer else None)
        )
        self.has_fresh_adapters = self.settings.lora is not None
        check_layout(self.architecture, self.settings.parallel, self.parallel.world_size)
        if self.settings.lora is not None:
            adapter_shapes(self.architecture, self.settings.lora)  # raises if not supported
        # The model. `setup_training` creates the optimizer.
        with accelerator.deterministic_seed(self.settings.seed):
            self.model: nn.Module = self.build_gpt(initialize=initialize)
        self.optimizer: RoleOptimizer | None = None
        self.adapters: RoleAdapters | None = None
        if self.settings.lora is not None:
            lora, seed = self.settings.lora, self.settings.seed
            self.adapters = RoleAdapters(self.gpt, self.architecture, self.parallel, lora, seed)
        self.forward_reuse = ForwardReuse(self.gpt)

    # Hooks of roles ---------------------------------------------------------------------------

    def add_head(self, gpt: GPTModel) -> None:
        """Replace the output layer by the role's head, if any."""

    def loss_step(self, loss_fn: LossFunction, denominators: Denominators) -> schedule.ForwardStep:
        """Return megatron-core's forward step that computes the loss and its metrics."""
        outputs = partial(self.loss_outputs, self.gpt, loss_fn=loss_fn)
        head = schedule.loss_head(outputs, loss_fn, denominators)
        return partial(schedule.forward_step, head=head)

    # The model -------------------------------------------------------------------------------

    @property
    def gpt(self) -> GPTModel:
        """Model of megatron-core without the data-parallel wrapper."""
        return self.model.module if self.optimizer is not None else self.model

    unwrapped = gpt

    def build_gpt(self, initialize: bool) -> GPTModel:
        """Build this process's shard of the model, with the role's head."""
        gpt = build_gpt(
            self.architecture.with_dropout(self.settings.dropout),
            self.settings,
            initialize=initialize,
            pre_process=self.parallel.is_first_stage,
            post_process=self.parallel.is_last_stage,
        )
        self.add_head(gpt)
        # Freezing keeps the routing of the checkpoint.
        if self.settings.freeze_moe_router:
            for name, parameter in gpt.named_parameters():
                parameter.requires_grad_(".router." not in name)
        return gpt

    def num_parameters(self) -> int:
        """Count the parameters on this process."""
        return sum(parameter.numel() for parameter in self.gpt.parameters())

    def setup_training(self) -> None:
        """Create gradient buffers and the optimizer, once, after the weights are loaded."""
        if self.optimizer is not None or self.settings.optim is None:
            return
        # The wrapper contains the gradient buffers.
        wrapped = wrap_for_training(self.gpt, self.parallel.dp_size, self.settings)
        self.optimizer = RoleOptimizer(wrapped, self.settings)
        self.model = wrapped

    def infer_frames(
        self,
        batch: Mapping[str, Tensor],
        head: schedule.Head,
        frames: Sequence[Tensor],
        micro_batches: schedule.MicroBatches | None = None,
        model: GPTModel | None = None,
        *,
        with_graph: bool = False,
    ) -> None:
        """See `RoleModel.infer_frames`. ``with_graph``: see `infer_microbatches`."""
        # Forward passes, whose results only the last pipeline stage returns.
        microbatches = self.split(batch, micro_batches or self.settings.forward_micro_batch_size)
        step = partial(schedule.forward_step, head=head)
        results = schedule.infer_microbatches(
            model or self.gpt, microbatches, step, with_graph=with_graph
        )
        if self.parallel.is_last_stage:
            start = 0
            for parts in results:
                for frame, part in zip(frames, parts, strict=True):
                    frame[start : start + part.shape[0], : part.shape[1]] = part
                start += parts[0].shape[0]
        if self.settings.parallel.pipeline > 1:
            for frame in frames:
                dist.broadcast(frame, src=self._last_stage, group=self.parallel.pp_group)

    @property
    def _last_stage(self) -> int:
        return dist.get_global_rank(self.parallel.pp_group, self.settings.parallel.pipeline - 1)

    # Learning ---------------------------------------------------------------------------------

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: AnyLossFunction | None = None,
        mbs: schedule.MicroBatches | None = None,
    ) -> dict[str, float]:
        """See `RoleModel.run_batch`."""
        # The dropout of adapters changes with every update.
        if self.adapters is not None and self.optimizer is not None:
            self.adapters.begin_update(self.optimizer.steps)
        denominators, own_tokens = count_denominators(batch, self.parallel.dp_group)
        step = self.loss_step(self.require_loss(loss_fn), denominators)
        microbatches = self.split(batch, mbs or self.settings.micro_batch_size)
        if forward_only:
            results = [
                metrics for _, metrics in schedule.infer_microbatches(self.gpt, microbatches, step)
            ]
        else:
            results = schedule.run_microbatches(
                self.model, self.forward_reuse.take(microbatches), step
            )
        # Only the last stage has the metrics. It sends them to all stages.
        reduced = None
        if self.parallel.is_last_stage:
            reduced = reduce_result(results, own_tokens, self.parallel.dp_group)
        return broadcast_floats(reduced, self._last_stage, self.parallel.pp_group)

    def drop_reused_forward(self) -> None:
        """Free the graph of a scoring pass that no update used."""
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
        """Build this role from an opened checkpoint and load the checkpoint's weights.

        Without a saved head (``rm_head``) the head is new. ``options``: constructor arguments.
        """
        if tokenizer is None and checkpoint.tokenizer_files:
            tokenizer = checkpoint.tokenizer
        # Without settings, use the role's defaults: the file's settings belong to another run.
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

    def nemo_artifacts(self) -> dict[str, Path]:
        """Return the files registered with NeMo, by their key in ``cfg``."""
        keys = getattr(self, "artifacts", None) or {}
        return {key: Path(functools.reduce(getitem, key.split("."), self.cfg)) for key in keys}

    @classmethod
    def restore_from(cls, restore_path: str, *args: Any, **kwargs: Any) -> Any:
        """Restore a `.nemo` file with NeMo's arguments, by default by `GPTSaveRestoreConnector`."""
        kwargs.setdefault("save_restore_connector", GPTSaveRestoreConnector())
        return super().restore_from(restore_path, *args, **kwargs)

    @classmethod
    def list_available_models(cls) -> None:
        """Return None, because no models can be downloaded."""
        return

    def setup_training_data(self, train_data_config: Any) -> None:
        """Do nothing, because the trainer owns the data."""

    setup_validation_data = setup_training_data
