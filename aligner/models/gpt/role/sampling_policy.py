"""Policy on every backend: scoring of tokens, and sampling of responses."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.config import LengthParams, SamplingParams
from aligner.errors import ConfigError
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.reference import ReferenceModel


class SamplingPolicy(RoleModel):
    """A role that scores tokens and samples them, of a backend's model (`model_to_sample_from`)."""

    samples_from_a_copy: ClassVar[bool] = False  # made in `prepare_for_generation`
    _generator: Generator | None = None

    def configure_sampling(self) -> None:
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
        return self.reference.infer(batch, micro_batches)

    def get_topk_logits(
        self,
        batch: Mapping[str, Tensor],
        k: int,
        vocab_size: int,
        micro_batches: MicroBatches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The ``k`` likeliest tokens at each position, among the first ``vocab_size``.

        ``batch`` as in `get_logprobs`. Returns their logits over the sampling temperature, float32
        ``[B, S, k]`` in descending order, and their ids, int64 ``[B, S, k]``: position t speaks of
        token t. 0 where ``token_mask`` is 0.
        """
        raise ConfigError(
            "policy.backend=dtensor gives no top-k logits; a teacher needs policy.backend=megatron"
        )

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """Freeze the current weights as the reference policy: a second model, or on the host."""
        raise NotImplementedError

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

    # Sampling ---------------------------------------------------------------------------------

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Set how `generator` samples; the sampling temperature also applies to all log-probs."""
        self.length_params = length
        self.sampling_params = sampling
        self.rollout_micro_batch_size = rollout_micro_batch_size
        self._generator = None

    @property
    def generator(self) -> Generator:
        """The sampling engine, with the current weights; see `Generator.sample`."""
        if self._generator is None:
            if self.samples_from_a_copy:
                raise ConfigError("generate: call prepare_for_generation() first, on every rank")
            self._generator = self._make_generator()
        return self._generator

    @property
    def is_ready_to_generate(self) -> bool:
        """True unless `prepare_for_generation` is needed first."""
        return self._generator is not None or not self.samples_from_a_copy

    def prepare_for_generation(self) -> None:
        """Enter evaluation mode, and copy the weights where the copy samples; collective."""
        self.prepare_for_inference()
        if self.samples_from_a_copy:
            self._generator = self._make_generator()

    def finish_generation(self) -> None:
        """Leave evaluation; a copy of the weights is given up."""
        if self.samples_from_a_copy:
            self._generator = None
        self.finish_inference()

    def model_to_sample_from(self) -> GPTModel:
        """A megatron-core model with the weights as they are now; collective where it is a copy."""
        raise NotImplementedError

    def _make_generator(self) -> Generator:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: the model was built without one; generation needs it")
        return Generator(
            self.model_to_sample_from(),
            self.architecture,
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.with_end_tokens(self.sampling_params.end_tokens).end_ids,
            pad_id=self.tokenizer.pad_id,
            length=self.length_params,
            sampling=self.sampling_params,
            max_batch_size=self.rollout_micro_batch_size,
            cuda_graphs=self.settings.cuda_graphs,
        )
