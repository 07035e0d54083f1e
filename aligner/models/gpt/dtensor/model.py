"""`DTensorModel`: base class of the roles on a transformers model that FSDP2 shards."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapter_shapes
from aligner.checkpoint.canonical import REWARD_HEAD, Weights, check_shape
from aligner.checkpoint.hf.any_model import LoadedWeights, model_config, unapplied_settings
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView, HuggingFaceWeights
from aligner.checkpoint.model_source import ModelSource
from aligner.config import check_layout
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.losses.interfaces import AnyLossFunction
from aligner.models.gpt.dtensor.adapters import check_that_all_learn
from aligner.models.gpt.dtensor.build import build_sharded
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.dtensor.optimizer import ShardOptimizer
from aligner.models.gpt.dtensor.plan import check_backend, check_dropout, check_gradients
from aligner.models.gpt.dtensor.shards import GatheredParameters, ParameterShard, SentWeights
from aligner.models.gpt.dtensor.state import BACKEND, load_shard_state, shard_state
from aligner.models.gpt.dtensor.ways import WORDS, ModelForm, examine, keyed_form
from aligner.models.gpt.forward.schedule import Head, MicroBatches, loss_head
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import count_denominators, on_rank_zero, reduce_result
from aligner.parallel.groups import ParallelState, initialize_parallel

# Names of the head's parameters in adapter files, by their names in the module.
_HEAD_NAMES = dict(zip(("score.weight", "score.bias"), REWARD_HEAD, strict=True))


class DTensorModel(RoleModel, LightningModule):
    """Part of a transformers model in one process, split by FSDP2 and tensor parallelism."""

    backend = BACKEND
    samples: ClassVar[bool] = False

    def __init__(
        self,
        source: ModelSource,
        settings: RoleSettings,
        parallel: ParallelState,
        tokenizer: Tokenizer,
    ) -> None:
        """Build this process's shards from an opened checkpoint, without an optimizer."""
        super().__init__()
        self.parallel, self.tokenizer = parallel, tokenizer
        self.architecture = source.architecture
        check_layout(self.architecture, settings.parallel, parallel.world_size)
        if settings.lora is not None:
            adapter_shapes(self.architecture, settings.lora)  # raises if not supported
        check_backend(self.architecture, settings.parallel, settings.lora)
        self.form = self._form_of(source)
        self.settings = _runnable(settings, self.form, self.architecture)
        self.model, self.shards = self.build(self._module_names(source.weights))
        self.optimizer: ShardOptimizer | None = None
        self.has_fresh_adapters = settings.lora is not None
        self._gradients_are_checked = settings.lora is None and settings.parallel.tensor == 1
        if settings.lora is not None and settings.adapters_path is not None:
            self.load_adapters(settings.adapters_path)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: ModelSource, *, settings: RoleSettings, tokenizer: Tokenizer
    ) -> Self:
        """Set up the process groups, and build this process's shards from an opened checkpoint."""
        parallel = initialize_parallel(settings.parallel, seed=settings.seed)
        model = cls(checkpoint, cls.settings_for(checkpoint, settings), parallel, tokenizer)
        model.read_config(checkpoint.config)
        return model

    def _form_of(self, source: ModelSource) -> ModelForm:
        """Return how the model runs. Rank 0 tests it for all ranks (see `examine`)."""
        if self.architecture.has_table:
            return ModelForm(logits=keyed_form(model_config(self.architecture)))
        weights = source.weights
        assert isinstance(weights, LoadedWeights)
        return on_rank_zero(lambda: examine(weights.model, samples=self.samples))

    # The model --------------------------------------------------------------------------------

    @property
    def unwrapped(self) -> TransformersModel:
        """See `RoleModel.unwrapped`."""
        return self.model

    def build(
        self, weights: Mapping[str, Tensor] | None
    ) -> tuple[TransformersModel, list[ParameterShard]]:
        """Build this process's shards of a model (see `build_sharded`)."""
        trained = self.settings.optim is not None
        check_dropout(self.settings.dropout, self.architecture, trained=trained)
        return build_sharded(
            self.architecture.with_dropout(self.settings.dropout),
            weights,
            self.parallel,
            self.settings,
            head_outputs=self.head_outputs,
            way=self.form.way,
        )

    @property
    def trained_shards(self) -> list[ParameterShard]:
        """Shards of the parameters that are trained, which are all if there are no adapters."""
        if self.settings.lora is None:
            return self.shards
        return [shard for shard in self.shards if shard.parameter.requires_grad]

    def setup_training(self) -> None:
        """Create the optimizer on the first call, if the settings contain one."""
        if self.optimizer is None and self.settings.optim is not None:
            self.optimizer = ShardOptimizer(self.trained_shards, self.parallel, self.settings)

    def way_in_words(self) -> str:
        """See `RoleModel.way_in_words`."""
        if self.architecture.has_table:
            return ""
        way, *parts = self.form.in_words()
        code = getattr(self.architecture, "code", "")
        builder = f"the code in {code}" if code else "transformers"
        parts = [f"{self.architecture.family} of {builder}: {way}", *parts]
        unapplied = unapplied_settings(self.architecture)
        if unapplied:
            shown = ", ".join(f"{name}={value:g}" for name, value in unapplied.items())
            parts.append(f"without these settings of config.json: {shown}")
        if (ranks := self.parallel.config.tensor) > 1:
            split = [s for s in self.shards if s.split_dim is not None]
            share = sum(math.prod(s.shape) for s in split) / self.num_parameters()
            whole = "" if any("att" in s.name for s in split) else ", but not attention"
            parts.append(f"{ranks} tensor-parallel ranks split {share:.0%} of the weights{whole}")
        if not self.model.layers:
            parts.append("sharded as one unit, because layers share weights")
        return "; ".join(parts)

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(torch.Size(shard.shape).numel() for shard in self.shards)

    # Passes -----------------------------------------------------------------------------------

    @torch.no_grad()
    def infer_frames(
        self,
        batch: Mapping[str, Tensor],
        head: Head,
        frames: Sequence[Tensor],
        micro_batches: MicroBatches | None = None,
        model: TransformersModel | None = None,
    ) -> None:
        """See `RoleModel.infer_frames`."""
        model = model or self.model
        start = 0
        for microbatch in self.split(
            batch, micro_batches or self.settings.forward_micro_batch_size
        ):
            results = model(microbatch.layout, lambda hidden, part=microbatch: head(hidden, part))
            rows = slice(start, start + len(results[0]))
            for frame, result in zip(frames, results, strict=True):
                frame[rows, : result.shape[1]] = result
            start = rows.stop

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: AnyLossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> dict[str, float]:
        """See `RoleModel.run_batch`."""
        loss = self.require_loss(loss_fn)
        denominators, own_tokens = count_denominators(batch, self.parallel.dp_group)
        head = loss_head(partial(self.loss_outputs, self.model, loss_fn=loss), loss, denominators)
        # Gradients accumulate in the parameters over micro-batches.
        parts = []
        with torch.set_grad_enabled(not forward_only):
            for microbatch in self.split(batch, mbs or self.settings.micro_batch_size):
                loss_part, metrics = self.model(
                    microbatch.layout, lambda hidden, part=microbatch: head(hidden, part)
                )
                if not forward_only:
                    loss_part.backward()
                parts.append(metrics)
        if not (self._gradients_are_checked or forward_only):
            lora = self.settings.lora
            if lora is not None:
                check_that_all_learn(self.shards, self.model.adapted, lora, self.parallel)
            if self.parallel.config.tensor > 1:
                check_gradients(self.shards, self.parallel)
            self._gradients_are_checked = True
        return reduce_result(parts, own_tokens, self.parallel.dp_group)

    @property
    def passes_are_collective(self) -> bool:
        """True, because FSDP2 gathers weights in every forward pass."""
        return True

    # Files ------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, Tensor]:
        """See `RoleModel.whole_weights`."""
        # One tensor at a time: all ranks gather it, rank 0 copies it to the host.
        weights: Mapping[str, Tensor] = self.gathered_weights()
        if self.architecture.has_table:
            weights = self.canonical_weights()
        gathered: dict[str, Tensor] = {}
        for name in weights:
            tensor = weights[name]
            if self.parallel.rank == 0:
                gathered[name] = tensor.to("cpu", copy=True)
        return gathered

    def gathered_weights(self) -> GatheredParameters:
        """Return full weights by their names in the module. All ranks must read the same names."""
        lora = self.settings.lora
        scale = 1.0 if lora is None else lora.scale
        # Files also contain the persistent buffers, which are the same on every rank.
        saved = self.model.state_dict().keys()
        buffers = {name: b for name, b in self.model.named_buffers() if name in saved}
        return GatheredParameters(self.shards, self.model.adapted, scale, buffers)

    def canonical_weights(self) -> HuggingFaceWeights:
        """Return full weights by canonical names. All ranks must read the same names."""
        family, _ = config_to_hf(self.architecture)
        return HuggingFaceWeights(self.gathered_weights(), family.table, self.architecture)

    @torch.no_grad()
    def load_whole_weights(self, weights: Weights, strict: bool = True) -> None:
        """See `RoleModel.load_whole_weights`."""
        named = self._module_names(weights)
        adapters = {f"{w.adapter}.{leaf}" for w in self.model.adapted for leaf in "ab"}
        for shard in self.shards:
            if shard.name in named:
                shard.local.copy_(shard.share_of(named[shard.name]))
            elif strict and shard.name not in adapters:
                raise CheckpointError(
                    f"the checkpoint does not contain {shard.name} of the model. Load a checkpoint "
                    "that this role saved"
                )

    def gather_adapters(self) -> dict[str, Tensor]:
        """See `RoleModel.gather_adapters`."""
        weights = GatheredParameters(self.trained_shards)
        return {_HEAD_NAMES.get(name, name): weights[name].to("cpu", copy=True) for name in weights}

    @torch.no_grad()
    def fill_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """See `RoleModel.fill_adapters`."""
        for shard in self.trained_shards:
            name = _HEAD_NAMES.get(shard.name, shard.name)
            if name in tensors:
                check_shape(name, tensors[name].shape, shard.shape)
                shard.local.copy_(shard.share_of(tensors[name]))

    def _module_names(self, weights: Weights) -> Mapping[str, Tensor]:
        """Return the weights of a `ModelSource` by the names of the module's parameters."""
        if not self.architecture.has_table:
            return SentWeights(weights, self.parallel)
        family, _ = config_to_hf(self.architecture)
        return HuggingFaceView(weights, family.table, self.architecture)

    # Run state --------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        """See `RoleModel.run_state`."""
        return shard_state(self.trained_shards, self.optimizer)

    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See `RoleModel.load_run_state`."""
        load_shard_state(self.trained_shards, self.optimizer, states)


def _runnable(
    settings: RoleSettings, form: ModelForm, architecture: GPTArchitecture
) -> RoleSettings:
    """Return the settings with packing and shared prefixes turned off if ``form`` forbids them."""
    packed = settings.sequence_packing
    if packed is True and form.way == "rows":
        faults = "; ".join(f"{WORDS[way]}: {fault}" for way, fault in form.faults.items())
        raise ConfigError(
            f"model.sequence_packing.enabled=true is not supported for {architecture.family} "
            f"models, which run with {WORDS['rows']} ({faults}). Set it to auto or false"
        )
    if packed == "auto":
        packed = not architecture.has_table and form.way != "rows"
    shares = settings.shared_prefixes and form.way == "aligner"
    return dataclasses.replace(settings, sequence_packing=packed, shared_prefixes=shares)
