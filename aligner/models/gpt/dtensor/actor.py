"""Policy on a transformers model: samples responses, scores tokens, and trains."""

from collections.abc import Mapping
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.hf.any_model import FileWeights
from aligner.checkpoint.model_source import ModelSource
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError
from aligner.models.gpt.decode.model import SampledModel
from aligner.models.gpt.dtensor.build import build_whole
from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.policy import SamplingPolicy
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import SumGradient
from aligner.parallel.groups import ParallelState


class DTensorActorModel(DTensorModel, SamplingPolicy):
    """Policy on a sharded transformers model. With megatron-core: `MegatronGPTActorModel`."""

    role_name = "policy"
    samples_from_a_copy = True
    samples = True

    def __init__(
        self,
        source: ModelSource,
        settings: RoleSettings,
        parallel: ParallelState,
        tokenizer: Tokenizer,
    ) -> None:
        """Build the policy as in `DTensorModel`, and configure its sampling from ``settings``."""
        super().__init__(source, settings, parallel, tokenizer)
        if self.form.logits is None:
            raise CheckpointError(
                f"{self.architecture.family} models do not compute logits as output_layer(hidden) "
                "times a constant, with or without a soft cap. A policy needs such logits. Set "
                "model.restore_from_path to a model of another type (a critic can use this one)"
            )
        self.logits_form = self.form.logits
        self.configure_sampling()

    # Scoring ----------------------------------------------------------------------------------

    def output_layer(self, model: TransformersModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `SamplingPolicy.output_layer`."""
        group = self.vocab_group
        rows = hidden if group is None else SumGradient.apply(hidden, group)
        return model.output_factors(rows)

    def trained_weights(self) -> dict[str, Tensor]:
        """See `SamplingPolicy.trained_weights`."""
        return {shard.name: shard.local for shard in self.trained_shards}

    @torch.no_grad()
    def copied_model(self) -> TransformersModel:
        """See `SamplingPolicy.copied_model`."""
        model, shards = self.build(None)
        for shard, ours in zip(shards, self.shards, strict=True):
            shard.local.copy_(ours.local)
        for buffer, ours in zip(model.buffers(), self.model.buffers(), strict=True):
            buffer.copy_(ours)
        return model

    # Generating -------------------------------------------------------------------------------

    def model_to_sample_from(self) -> GPTModel | SampledModel:
        """Return a second model with the current weights. All ranks must call this method.

        The model is a megatron-core model, split over tensor-parallel ranks only. It samples the
        same tokens as the megatron backend. If megatron-core does not support the architecture,
        every process gets an unsharded transformers model.
        """
        if not self.architecture.has_table:
            whole = build_whole(self.architecture, self.gathered_weights(), self.settings.dtype)
            assert self.form.decoder is not None
            return SampledModel(whole, partial(self.form.decoder, whole), self.vocab_group)
        settings = RoleSettings(precision=self.settings.precision, parallel=self.parallel.config)
        gpt = build_gpt(self.architecture, settings, initialize=False)
        load_weights(
            gpt,
            self.canonical_weights(),
            self.architecture,
            tp_rank=self.parallel.tp_rank,
            tp_size=self.parallel.config.tensor,
        )
        return gpt.eval().requires_grad_(False)

    def hugging_face_weights(self) -> Mapping[str, Tensor]:
        """See `SamplingPolicy.hugging_face_weights`."""
        weights = self.gathered_weights()
        has_table = self.architecture.has_table
        return weights if has_table else FileWeights(weights, self.architecture)
