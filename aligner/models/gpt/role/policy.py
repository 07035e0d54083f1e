"""Policy on any backend: scores tokens, samples responses, and keeps a frozen reference."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.config import LengthParams, SamplingParams
from aligner.errors import ConfigError
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from aligner.losses.interfaces import LossInputType, PublishedLoss
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.decode.model import SampledModel
from aligner.models.gpt.forward.schedule import Microbatch, MicroBatches
from aligner.models.gpt.forward.token_logprobs import (
    LogitsForm,
    Projection,
    best_candidates,
    candidate_logprobs,
    token_logits,
    token_logprobs,
)
from aligner.models.gpt.lora import adapters_off
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.training_state import SwappedWeights
from aligner.models.interfaces import Inferrable
from aligner.types import LossFunction, TokenOutputs


class ReferencePolicy(LightningModule, Inferrable):
    """Reference policy: scores tokens with the weights of the policy at construction.

    ``mode="keep"``: a second model on the device has these weights. ``mode="swap"``: they are in
    host memory. Scoring exchanges them with the policy's weights twice, without more device memory.
    ``mode="bare"``: the policy scores with its adapters off. They must begin without effect.
    """

    def __init__(self, policy: "SamplingPolicy", mode: Literal["keep", "swap", "bare"]) -> None:
        super().__init__()
        self._policy = (policy,)  # a tuple, so that the module is not registered here
        self.gpt = policy.copied_model().requires_grad_(False) if mode == "keep" else None
        self._initial = SwappedWeights(policy.trained_weights()) if mode == "swap" else None
        self.eval()

    @contextlib.contextmanager
    def initial_model(self) -> Iterator[nn.Module]:
        """Yield a model with the initial weights, for inference inside the block."""
        if self.gpt is not None:
            yield self.gpt
            return
        policy = self._policy[0].unwrapped
        with adapters_off(policy) if self._initial is None else self._initial.in_place():
            yield policy

    def infer(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Compute log-probs, float32 ``[B, S]``, as `SamplingPolicy.get_logprobs` does."""
        with self.initial_model() as initial:
            return self._policy[0].infer_tokens(batch, micro_batches, initial)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """See `infer`."""
        return self.infer(batch)

    def prepare_for_inference(self) -> None:
        """Do nothing, because the model is always in evaluation mode."""

    finish_inference = prepare_for_inference

    def train(self, mode: bool = True) -> Self:
        """Ignore ``mode``: the model is always in evaluation mode."""
        del mode
        return super().train(False)


class SamplingPolicy(RoleModel):
    """A role that scores tokens and samples responses, on any backend."""

    samples_from_a_copy: ClassVar[bool] = False  # created in `prepare_for_generation`
    logits_form: LogitsForm = LogitsForm()
    _generator: Generator | None = None

    def configure_sampling(self) -> None:
        """Configure sampling from the settings. Subclasses call this after building the model."""
        self.__dict__["_reference"] = None  # bypasses nn.Module, so that it is not trained
        settings = self.settings
        self.configure_generation(
            settings.length_params, settings.sampling_params, settings.rollout_micro_batch_size
        )

    # Scoring ----------------------------------------------------------------------------------

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """Process group whose ranks split the vocabulary. None if one rank has all of it."""
        return self.parallel.tp_group if self.parallel.config.tensor > 1 else None

    @abstractmethod
    def output_layer(self, model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and a weight whose product is this rank's shard of the logits.

        Hidden states: float ``[n * L, H]``, with gradients that are summed over tensor-parallel
        ranks. Weight: this rank's rows of the output layer, float ``[V / tp, H]``.
        """

    def projection(self, model: Any, hidden: Tensor) -> Projection:
        """Return the `Projection` of ``hidden`` [n, L, H] to logits at the sampling temperature."""
        factors = self.output_layer(model, hidden)
        cap, size = self.logits_form.cap, self.architecture.vocab_size
        cap = None if cap is None else cap / self.sampling_params.temperature
        return Projection(*factors, size, self.vocab_group, self.scored_sampling.temperature, cap)

    def token_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Compute log-probs and any entropy where ``token_mask`` is 1 (see `RoleModel`).

        If the batch has a column ``teacher_topk_indices``, int64 ``[b, s, k]``, the log-probs are
        those of its k tokens per position, not of the sampled tokens.
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
            sampling=self.scored_sampling,
            with_entropy=with_entropy,
            kept_ids=columns.get("kept_ids"),
        )

    def loss_outputs(
        self, model: Any, hidden: Tensor, microbatch: Microbatch, loss_fn: LossFunction
    ) -> TokenOutputs:
        """Compute `token_outputs`, or logits float32 ``[B, S, V]`` if ``loss_fn`` reads logits."""
        if isinstance(loss_fn, PublishedLoss) and loss_fn.input_type is LossInputType.LOGIT:
            return TokenOutputs(token_logits(self.projection(model, hidden), microbatch.layout))
        return super().loss_outputs(model, hidden, microbatch, loss_fn)

    def get_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Compute log-probs float32 ``[B, S]`` under the current weights, 0 outside ``token_mask``.

        ``batch``: ``input_ids`` int64 ``[B, S]``, ``input_lengths`` int64 ``[B]``, ``token_mask``
        ``[B, S]`` (1 for tokens to score). ``micro_batches``: see `RoleModel.infer_tokens`.
        """
        return self.infer_tokens(batch, micro_batches)

    def get_reference_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Compute log-probs as `get_logprobs` does, under the initial weights."""
        return self.reference.infer(batch, micro_batches)

    def get_topk_logits(
        self,
        batch: Mapping[str, Tensor],
        k: int,
        vocab_size: int,
        micro_batches: MicroBatches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most likely of the first ``vocab_size`` tokens at each position.

        ``batch``: see `get_logprobs`. Returns logits divided by the sampling temperature, float32
        ``[B, S, k]`` in descending order, and token ids, int64 ``[B, S, k]``. Column t contains the
        candidates for token t. Both are 0 where ``token_mask`` is 0.
        """

        def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
            projection = self.projection(self.unwrapped, hidden)._replace(vocab_size=vocab_size)
            return best_candidates(projection, microbatch.selected, microbatch.layout, k)

        ids = batch["input_ids"].new_zeros(*batch["input_ids"].shape, k)
        logits = torch.zeros(ids.shape, device=ids.device)
        self.infer_frames(batch, head, [logits, ids], micro_batches)
        return logits, ids

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """Freeze the current weights as the reference policy (see `ReferencePolicy`).

        With adapters ``mode`` is ignored, because the frozen weights need no copy.
        """
        kind: Literal["keep", "swap", "bare"] = mode
        if self.settings.lora is not None:
            kind = "bare" if self.has_fresh_adapters else "swap"
        self.__dict__["_reference"] = ReferencePolicy(self, kind)

    @abstractmethod
    def trained_weights(self) -> dict[str, Tensor]:
        """Return this process's elements of the trained parameters, by name."""

    @abstractmethod
    def copied_model(self) -> nn.Module:
        """Build a second model with the current weights."""

    @property
    def reference(self) -> ReferencePolicy:
        """Reference policy. Raises `ConfigError` before `keep_reference` is called."""
        reference: ReferencePolicy | None = self.__dict__["_reference"]
        if reference is None:
            raise ConfigError(
                "no reference policy was kept. Call keep_reference() right after the weights are "
                "loaded (a run does so when a KL coefficient is above 0)"
            )
        return reference

    # Sampling ---------------------------------------------------------------------------------

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Configure `generator`. All log-probs are computed at the sampling temperature."""
        self.length_params = length
        self.sampling_params = sampling
        # Log-probs use the distribution after top-k and top-p, to which the target always belongs.
        temperature = sampling.temperature / self.logits_form.scale
        self.scored_sampling = TrainingSamplingParams(
            sampling.top_k, sampling.top_p, temperature, keep_target=True
        )
        self.rollout_micro_batch_size = rollout_micro_batch_size
        self._generator = None

    @property
    def generator(self) -> Generator:
        """Sampling engine with the current weights (see `Generator.sample`)."""
        if self._generator is None:
            if self.samples_from_a_copy:
                raise ConfigError("generate: call prepare_for_generation() first, on every rank")
            self._generator = self._make_generator()
        return self._generator

    @property
    def is_ready_to_generate(self) -> bool:
        """False if `prepare_for_generation` must be called first."""
        return self._generator is not None or not self.samples_from_a_copy

    def prepare_for_generation(self) -> None:
        """Enter evaluation mode, and build the second model that samples, if any, on all ranks."""
        self.prepare_for_inference()
        if self.samples_from_a_copy:
            self._generator = self._make_generator()

    def finish_generation(self) -> None:
        """End generation, and free the second model that samples, if any."""
        if self.samples_from_a_copy:
            self._generator = None
        self.finish_inference()

    def release_generator(self) -> None:
        """See `RoleModel`."""
        if self._generator is not None:
            self._generator.release()

    @abstractmethod
    def model_to_sample_from(self) -> GPTModel | SampledModel:
        """Return the model that samples: this model, or a copy of it, which all ranks build."""

    @abstractmethod
    def hugging_face_weights(self) -> Mapping[str, Tensor]:
        """Return full weights by Hugging Face name. A weight is gathered when all ranks read it."""

    def _make_generator(self) -> Generator:
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer: the model was built without a tokenizer. To generate, build it with one"
            )
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
