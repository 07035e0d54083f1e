"""Policy on every backend: scoring of tokens, and sampling of responses."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.config import Drawing, LengthParams, SamplingParams
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.parallel import ParallelState
from aligner.errors import ConfigError
from aligner.models.gpt.decode.generator import GenerationOutput, Generator
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.reference import ReferenceModel
from aligner.models.gpt.role.settings import RoleSettings


class DrawingPolicy:
    """Mixin beside a backend's model, of which `_make_generator` makes a generator."""

    parallel: ParallelState
    settings: RoleSettings
    architecture: GPTArchitecture
    tokenizer: Tokenizer | None
    _generator: Generator | None

    def configure_drawing(self) -> None:
        """Apply the settings, without a reference policy; for the end of a constructor."""
        self.__dict__["_reference"] = None  # not a module of this one: it is not trained with it
        settings = self.settings
        self.configure_generation(
            settings.length_params, settings.sampling_params, settings.rollout_micro_batch_size
        )

    # Scoring ----------------------------------------------------------------------------------

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """Spreads the vocabulary; None: it is whole."""
        return self.parallel.tp_group if self.parallel.config.tensor > 1 else None

    def infer_tokens(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None, model: Any = None
    ) -> Tensor:
        """One number a token, by the backend's model; see `MegatronGPTModel.infer_tokens`."""
        raise NotImplementedError

    def get_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs under the current weights.

        Args:
            batch: ``input_ids`` int64 ``[B, S]``, ``input_lengths`` int64 ``[B]``, ``token_mask``
                ``[B, S]`` (1 where a log-prob is wanted).
            micro_batches: sequences per forward pass, or the rows of each; default
                ``forward_micro_batch_size``.

        Returns:
            float32 ``[B, S]``, 0 where ``token_mask`` is 0.
        """
        return self.infer_tokens(batch, micro_batches)

    def get_reference_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """As `get_logprobs`, under the weights that training began with."""
        return self.reference.get_logprobs(batch, micro_batches)

    @property
    def reference(self) -> ReferenceModel:
        """The policy that training began with; `ConfigError` before ``keep_reference``."""
        found: ReferenceModel | None = self.__dict__["_reference"]
        if found is None:
            raise ConfigError(
                "no reference policy was kept: call keep_reference() right after the weights are "
                "loaded (a run does so when a KL coefficient is above 0)"
            )
        return found

    # Drawing ----------------------------------------------------------------------------------

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Set how `generate` draws; the sampling temperature also applies to all log-probs."""
        self.length_params = length
        self.sampling_params = sampling
        self.rollout_micro_batch_size = rollout_micro_batch_size
        self._generator = None

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
        """Continue right-padded prompts; see
        `aligner.models.gpt.decode.generator.Generator.generate`.
        """
        return self._ready_generator().generate(
            prompts,
            prompt_lengths,
            sample_ids,
            seed=seed,
            greedy=greedy,
            drawing=drawing,
            listener=listener,
        )

    def _ready_generator(self) -> Generator:
        """Generator with the current weights."""
        raise NotImplementedError

    def _make_generator(self, gpt: GPTModel) -> Generator:
        """Generator with the weights of ``gpt``."""
        if self.tokenizer is None:
            raise ConfigError("tokenizer: the model was built without one; generation needs it")
        return Generator(
            gpt,
            self.architecture,
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.with_end_tokens(self.sampling_params.end_tokens).end_ids,
            pad_id=self.tokenizer.pad_id,
            length=self.length_params,
            sampling=self.sampling_params,
            max_batch_size=self.rollout_micro_batch_size,
            cuda_graphs=self.settings.cuda_graphs,
        )
