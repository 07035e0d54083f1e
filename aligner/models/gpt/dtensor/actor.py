"""The policy on a transformers model: generates responses, scores tokens, and learns."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.model_source import ModelSource
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.losses.interfaces import reads_logits
from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.dtensor.shards import WholeParameters
from aligner.models.gpt.forward.schedule import Microbatch
from aligner.models.gpt.forward.token_logprobs import token_logits, token_logprobs
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.offload import SwappedWeights
from aligner.models.gpt.role.policy import ReferenceModel, SamplingPolicy
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import SumGradient
from aligner.parallel.groups import ParallelState
from aligner.types import LossFunction, TokenOutputs


class DTensorReference(ReferenceModel):
    """The initial weights of such a policy: a second model, or copies in host memory."""

    @torch.no_grad()
    def __init__(self, policy: "DTensorActorModel", mode: Literal["keep", "swap"]) -> None:
        """``mode`` as in `ReferencePolicy`."""
        super().__init__(policy.infer_tokens)
        self._policy = (policy,)  # in a tuple: it stays a module of its own
        self.copy: TransformersModel | None = None
        self._held: SwappedWeights | None = None
        if mode == "swap":
            self._held = SwappedWeights({shard.name: shard.local for shard in policy.shards})
            return
        self.copy, copies = policy.build(None)
        self.copy.eval().requires_grad_(False)
        for copy, shard in zip(copies, policy.shards, strict=True):
            copy.local.copy_(shard.local)

    @contextlib.contextmanager
    def initial_model(self) -> Iterator[TransformersModel]:
        """See `ReferenceModel`."""
        if self.copy is not None:
            yield self.copy
            return
        assert self._held is not None
        with self._held.in_place():
            yield self._policy[0].model


class DTensorActorModel(DTensorModel, SamplingPolicy):
    """PPO's actor, the counterpart of `MegatronGPTActorModel`."""

    role_name = "policy"
    samples_from_a_copy = True

    def __init__(
        self,
        source: ModelSource,
        settings: RoleSettings,
        parallel: ParallelState,
        tokenizer: Tokenizer,
    ) -> None:
        """Arguments as in `DTensorModel`; the settings include sampling."""
        super().__init__(source, settings, parallel, tokenizer)
        self.configure_sampling()

    # Scoring ----------------------------------------------------------------------------------

    def token_outputs(
        self,
        model: TransformersModel,
        hidden: Tensor,
        microbatch: Microbatch,
        with_entropy: bool,
    ) -> TokenOutputs:
        """Log-probs (and entropy) where ``token_mask`` is 1; see `DTensorModel.token_outputs`."""
        tp_group = self.vocab_group
        return token_logprobs(
            self._vocab_input(hidden),
            model.output_weight(),
            microbatch.columns["input_ids"],
            microbatch.selected,
            microbatch.layout,
            vocab_size=self.architecture.vocab_size,
            tp_group=tp_group,
            sampling=self.sampling_params,
            with_entropy=with_entropy,
            kept_ids=microbatch.columns.get("kept_ids"),
        )

    def loss_outputs(
        self, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """Outputs that ``loss_fn`` reads of hidden states [n * L, H].

        Log-probs float32 [B, S], or all logits float32 [B, S, V] where the loss reads them.
        """
        if not reads_logits(loss_fn):
            return super().loss_outputs(hidden, microbatch, loss_fn)
        logits = token_logits(
            self._vocab_input(hidden),
            self.model.output_weight(),
            microbatch.layout,
            vocab_size=self.architecture.vocab_size,
            tp_group=self.vocab_group,
            temperature=self.sampling_params.temperature,
        )
        return TokenOutputs(logits)

    def _vocab_input(self, hidden: Tensor) -> Tensor:
        """Hidden states to be multiplied with this rank's part of the vocabulary."""
        group = self.vocab_group
        return hidden if group is None else SumGradient.apply(hidden, group)

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """See `SamplingPolicy.keep_reference`."""
        self.__dict__["_reference"] = DTensorReference(self, mode)

    # Generating -------------------------------------------------------------------------------

    def model_to_sample_from(self) -> GPTModel:
        """A copy of the weights in a megatron-core model, as they are now; collective.

        For as long as rollouts are made, the weights stand once more in the same tensor-parallel
        layout, unsharded over data-parallel ranks: the tokens are those of the megatron backend.
        This costs the weights of a tensor-parallel rank, in the dtype of the forward pass, beside
        the rank's share.
        """
        gpt = build_gpt(
            self.architecture,
            dtype=self.settings.dtype,
            parallel=self.parallel.config,
            initialize=False,
        )
        load_weights(
            gpt,
            self.canonical_weights(),
            self.architecture,
            tp_rank=self.parallel.tp_rank,
            tp_size=self.parallel.config.tensor,
        )
        return gpt.eval().requires_grad_(False)

    # Weights for other engines ----------------------------------------------------------------

    def hugging_face_weights(self) -> WholeParameters:
        """The whole weights under Hugging Face's names, gathered when indexed; collective."""
        return WholeParameters(self.shards)
