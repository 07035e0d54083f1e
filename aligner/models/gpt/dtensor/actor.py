"""The policy on a transformers model: generates responses, scores tokens, and learns."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from aligner.checkpoint.model_source import ModelSource
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.adjoint_collectives import SumGradient
from aligner.distributed.parallel import ParallelState
from aligner.errors import ConfigError
from aligner.losses.interfaces import reads_logits
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.dtensor.generation import megatron_copy
from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.dtensor.shards import WholeParameters
from aligner.models.gpt.forward.schedule import Microbatch
from aligner.models.gpt.forward.token_logprobs import token_logits, token_logprobs
from aligner.models.gpt.role.drawing_policy import DrawingPolicy
from aligner.models.gpt.role.held_weights import HeldWeights
from aligner.models.gpt.role.reference import ReferenceModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.types import LossFunction, TokenOutputs


class DTensorReference(ReferenceModel):
    """The initial weights of such a policy: a second model, or copies in host memory."""

    @torch.no_grad()
    def __init__(self, policy: "DTensorActorModel", mode: Literal["keep", "swap"]) -> None:
        """``mode`` as in `ReferencePolicy`."""
        super().__init__(policy.infer_tokens)
        self._policy = (policy,)  # in a tuple: it stays a module of its own
        self.copy: TransformersModel | None = None
        self._held: HeldWeights | None = None
        if mode == "swap":
            self._held = HeldWeights({shard.name: shard.local for shard in policy.shards})
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


class DTensorActorModel(DTensorModel, DrawingPolicy):
    """PPO's actor, the twin of `MegatronGPTActorModel`."""

    role_name = "policy"
    _generator: Generator | None = None

    def __init__(
        self,
        source: ModelSource,
        settings: RoleSettings,
        parallel: ParallelState,
        tokenizer: Tokenizer,
    ) -> None:
        """Arguments as in `DTensorModel`; the settings include sampling."""
        super().__init__(source, settings, parallel, tokenizer)
        self.configure_drawing()

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
        """Freeze the current weights as the reference policy: a second model, or on the host."""
        self.__dict__["_reference"] = DTensorReference(self, mode)

    # Generating -------------------------------------------------------------------------------

    @property
    def is_ready_to_generate(self) -> bool:
        """True if `prepare_for_generation` was called and `finish_generation` was not."""
        return self._generator is not None

    def prepare_for_generation(self) -> None:
        """Gather the weights into the model that generates; collective."""
        self.prepare_for_inference()
        self._generator = self._make_generator(
            megatron_copy(self.shards, self.architecture, self.parallel, self.settings.dtype)
        )

    def finish_generation(self) -> None:
        """Give up the model that generates."""
        self._generator = None
        self.finish_inference()

    def _ready_generator(self) -> Generator:
        if self._generator is None:
            raise ConfigError("generate: call prepare_for_generation() first, on every rank")
        return self._generator

    # Weights for other engines ----------------------------------------------------------------

    def hugging_face_weights(self) -> WholeParameters:
        """The whole weights under Hugging Face's names, gathered when indexed; collective."""
        return WholeParameters(self.shards)
