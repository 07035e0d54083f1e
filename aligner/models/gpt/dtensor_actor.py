"""The policy on a transformers model: generates responses, scores tokens, and learns."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.algorithms.losses.interfaces import reads_logits
from aligner.checkpoint.model_source import ModelSource
from aligner.config import Drawing, LengthParams, SamplingParams
from aligner.data.tokenizer import Tokenizer
from aligner.distributed import accelerator
from aligner.distributed.adjoint_collectives import SumGradient
from aligner.distributed.parallel import ParallelState
from aligner.errors import ConfigError
from aligner.models.gpt.dtensor import DTensorModel
from aligner.models.gpt.dtensor_generation import megatron_copy
from aligner.models.gpt.dtensor_model import TransformersModel
from aligner.models.gpt.dtensor_shards import WholeParameters
from aligner.models.gpt.generation import GenerationOutput, Generator
from aligner.models.gpt.pipeline import Microbatch, MicroBatches
from aligner.models.gpt.reference import ReferenceModel
from aligner.models.gpt.rollout import TokenListener
from aligner.models.gpt.settings import RoleSettings
from aligner.models.gpt.token_logprobs import token_logits, token_logprobs
from aligner.types import LossFunction, TokenOutputs


class DTensorReference(ReferenceModel):
    """The initial weights of such a policy: a second model, or copies in host memory."""

    @torch.no_grad()
    def __init__(self, policy: "DTensorActorModel", mode: Literal["keep", "swap"]) -> None:
        """``mode`` as of `ReferencePolicy`."""
        super().__init__(policy.infer_tokens)
        self._policy = (policy,)  # in a tuple: it stays a module of its own
        self.copy: TransformersModel | None = None
        self._held: dict[str, Tensor] = {}
        if mode == "swap":
            self._held = {
                shard.name: accelerator.to_host(shard.local.clone()) for shard in policy.shards
            }
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
        self._exchange()
        try:
            yield self._policy[0].model
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for shard in self._policy[0].shards:
            current = accelerator.to_host(shard.local.clone())
            shard.local.copy_(self._held[shard.name])
            self._held[shard.name] = current


class DTensorActorModel(DTensorModel):
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
        """Arguments as of `DTensorModel`; the settings say how it draws, too."""
        super().__init__(source, settings, parallel, tokenizer)
        self.__dict__["_reference"] = None  # not a module of this one: it is not trained with it
        self.configure_generation(
            settings.length_params, settings.sampling_params, settings.rollout_micro_batch_size
        )

    # Scoring ----------------------------------------------------------------------------------

    def token_outputs(
        self,
        model: TransformersModel,
        hidden: Tensor,
        microbatch: Microbatch,
        with_entropy: bool,
    ) -> TokenOutputs:
        """Log-probs (and entropy) where ``token_mask`` is 1."""
        tp_group = self._vocab_group
        return token_logprobs(
            self._vocab_input(hidden),
            model.output_weight(),
            microbatch.columns["input_ids"],
            microbatch.columns["token_mask"],
            microbatch.layout,
            vocab_size=self.architecture.vocab_size,
            tp_group=tp_group,
            sampling=self.sampling_params,
            with_entropy=with_entropy,
        )

    def loss_outputs(
        self, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """What ``loss_fn`` reads of each token: log-probs, or all logits."""
        if not reads_logits(loss_fn):
            return super().loss_outputs(hidden, microbatch, loss_fn)
        logits = token_logits(
            self._vocab_input(hidden),
            self.model.output_weight(),
            microbatch.layout,
            vocab_size=self.architecture.vocab_size,
            tp_group=self._vocab_group,
            temperature=self.sampling_params.temperature,
        )
        return TokenOutputs(logits)

    @property
    def _vocab_group(self) -> dist.ProcessGroup | None:
        return self.parallel.tp_group if self.parallel.config.tensor > 1 else None

    def _vocab_input(self, hidden: Tensor) -> Tensor:
        """Hidden states to be multiplied with this rank's part of the vocabulary."""
        group = self._vocab_group
        return hidden if group is None else SumGradient.apply(hidden, group)

    def get_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs under the current weights; see `MegatronGPTActorModel.get_logprobs`."""
        return self.infer_tokens(batch, micro_batches)

    def get_reference_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """As `get_logprobs`, under the weights that training began with."""
        return self.reference.get_logprobs(batch, micro_batches)

    @property
    def reference(self) -> "DTensorReference":
        """The policy that training began with; `ConfigError` before `keep_reference`."""
        found: DTensorReference | None = self.__dict__["_reference"]
        if found is None:
            raise ConfigError(
                "no reference policy was kept: call keep_reference() right after the weights are "
                "loaded (a run does so when a KL coefficient is above 0)"
            )
        return found

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """Freeze the current weights as the reference policy: a second model, or on the host."""
        self.__dict__["_reference"] = DTensorReference(self, mode)

    # Generating -------------------------------------------------------------------------------

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Set how `generate` draws; the sampling temperature also applies to all log-probs."""
        self.length_params = length
        self.sampling_params = sampling
        self.rollout_micro_batch_size = rollout_micro_batch_size

    @property
    def is_ready_to_generate(self) -> bool:
        """Whether `prepare_for_generation` was called and `finish_generation` was not."""
        return self._generator is not None

    def prepare_for_generation(self) -> None:
        """Gather the weights into the model that generates; collective."""
        self.prepare_for_inference()
        assert self.tokenizer is not None
        self._generator = Generator(
            megatron_copy(self.shards, self.architecture, self.parallel, self.settings.dtype),
            self.architecture,
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.with_end_tokens(self.sampling_params.end_tokens).end_ids,
            pad_id=self.tokenizer.pad_id,
            length=self.length_params,
            sampling=self.sampling_params,
            max_batch_size=self.rollout_micro_batch_size,
            cuda_graphs=self.settings.cuda_graphs,
        )

    def finish_generation(self) -> None:
        """Give up the model that generates."""
        self._generator = None
        self.finish_inference()

    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_ids: Tensor,
        *,
        seed: int,
        greedy: bool | None = None,
        drawing: Drawing | None = None,
        listener: TokenListener | None = None,
    ) -> GenerationOutput:
        """Continue right-padded prompts; see `aligner.models.gpt.generation.Generator`."""
        if self._generator is None:
            raise ConfigError("generate: call prepare_for_generation() first, on every rank")
        return self._generator.generate(
            prompts,
            prompt_lengths,
            sample_ids,
            seed=seed,
            greedy=greedy,
            drawing=drawing,
            listener=listener,
        )

    # Weights for other engines ----------------------------------------------------------------

    def hugging_face_weights(self) -> WholeParameters:
        """The whole weights under Hugging Face's names, gathered when indexed; collective."""
        return WholeParameters(self.shards)
