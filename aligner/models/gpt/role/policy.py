"""Policy on every backend: scoring of tokens, sampling of responses, and the frozen reference.

The reference is the weights that training began with.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch.distributed as dist
from lightning.pytorch import LightningModule
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.config import LengthParams, SamplingParams
from aligner.errors import ConfigError
from aligner.losses.interfaces import reads_logits
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.forward.schedule import Microbatch, MicroBatches
from aligner.models.gpt.forward.token_logprobs import (
    Projection,
    candidate_logprobs,
    token_logits,
    token_logprobs,
)
from aligner.models.gpt.lora import adapters_off
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.offload import SwappedWeights
from aligner.models.interfaces import Inferrable
from aligner.types import LossFunction, TokenOutputs

# (batch, micro-batches, model with the initial weights) -> log-probs, as the policy scores.
Score = Callable[[Mapping[str, Tensor], MicroBatches | None, Any], Tensor]


class ReferencePolicy(LightningModule, Inferrable):
    """Scores tokens as a policy did before it learned; it never learns itself.

    ``keep``: a second model on the device, ready at once. ``swap``: a copy of the weights in host
    memory, exchanged with the policy's while the reference scores; on a GPU this costs two copies
    of the weights per use and no device memory. Of a policy with adapters these are all there is to
    exchange. ``bare``: the policy without its adapters, which began as nothing.

    The module has parameters of its own with ``keep`` only; nothing of the policy is registered.
    """

    def __init__(
        self,
        policy: nn.Module,
        mode: Literal["keep", "swap", "bare"],
        score: Score,
        *,
        weights: Mapping[str, Tensor],
        copy: Callable[[], nn.Module],
    ) -> None:
        """Hold the initial weights.

        Args:
            policy: the model that learns.
            mode: see the class.
            score: the policy's way to make log-probs of a model.
            weights: those that learn, float tensors of any shape by name; for ``swap``.
            copy: makes a second model with the policy's weights; for ``keep``.
        """
        super().__init__()
        self._score = score
        self._policy = (policy,)  # in a tuple: it stays the policy's own module
        self.gpt = copy().requires_grad_(False) if mode == "keep" else None
        self._initial = SwappedWeights(weights) if mode == "swap" else None
        self.eval()

    @contextlib.contextmanager
    def initial_model(self) -> Iterator[nn.Module]:
        """A model with the initial weights, for inference inside the block."""
        if self.gpt is not None:
            yield self.gpt
            return
        policy = self._policy[0]
        initially = adapters_off(policy) if self._initial is None else self._initial.in_place()
        with initially:
            yield policy

    def infer(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs float32 ``[B, S]`` under the initial weights.

        ``batch`` and ``micro_batches`` as in `SamplingPolicy.get_logprobs`.
        """
        with self.initial_model() as initial:
            return self._score(batch, micro_batches, initial)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """See `infer`."""
        return self.infer(batch)

    def prepare_for_inference(self) -> None:
        """Nothing to prepare: it is always in evaluation mode."""

    def finish_inference(self) -> None:
        """Nothing to leave."""

    def train(self, mode: bool = True) -> Self:
        """Ignored: the model stays in evaluation mode."""
        del mode
        return super().train(False)


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

    def output_layer(self, model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the logits: rows ``[n * L, H]`` and weight ``[V / tp, H]``, float.

        ``hidden`` as in `token_outputs`. Under tensor parallelism the rows' gradient is summed.
        """
        raise NotImplementedError

    def projection(self, model: Any, hidden: Tensor) -> Projection:
        """`output_layer` of ``hidden`` [n, L, H], with the vocabulary and the temperature."""
        factors = self.output_layer(model, hidden)
        size, temperature = self.architecture.vocab_size, self.sampling_params.temperature
        return Projection(*factors, size, self.vocab_group, temperature)

    def token_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Log-probs where ``token_mask`` is 1, with entropy; see `RoleModel.token_outputs`.

        Of the tokens themselves, or of ``teacher_topk_indices`` where the micro-batch has them.
        """
        columns, selected, layout = microbatch.columns, microbatch.selected, microbatch.layout
        projection = self.projection(model, hidden)
        if "teacher_topk_indices" in columns:
            candidates = columns["teacher_topk_indices"]
            return candidate_logprobs(
                projection, candidates, selected, layout, with_entropy=with_entropy
            )
        return token_logprobs(
            projection,
            columns["input_ids"],
            selected,
            layout,
            sampling=self.sampling_params,
            with_entropy=with_entropy,
            kept_ids=columns.get("kept_ids"),
        )

    def loss_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """`token_outputs`, or all logits float32 ``[B, S, V]`` where ``loss_fn`` reads them."""
        if not reads_logits(loss_fn):
            return super().loss_outputs(model, hidden, microbatch, loss_fn)
        return TokenOutputs(token_logits(self.projection(model, hidden), microbatch.layout))

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
    def reference(self) -> ReferencePolicy:
        """The policy that training began with; `ConfigError` before ``keep_reference``."""
        found: ReferencePolicy | None = self.__dict__["_reference"]
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

    def release_generator(self) -> None:
        """See `RoleModel`."""
        if self._generator is not None:
            self._generator.release()

    def model_to_sample_from(self) -> GPTModel:
        """A megatron-core model with the weights as they are now; collective where it is a copy."""
        raise NotImplementedError

    def hugging_face_weights(self) -> Mapping[str, Tensor]:
        """The whole weights under Hugging Face's names, gathered when indexed; collective."""
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
            record_kept=self.settings.record_kept,
            cuda_graphs=self.settings.cuda_graphs,
        )
