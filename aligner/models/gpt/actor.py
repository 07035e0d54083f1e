"""The policy: generates responses, scores tokens, and learns from a policy loss."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.algorithms.losses.interfaces import reads_logits
from aligner.config import (
    Drawing,
    LengthParams,
    ModelConfig,
    RSModelConfig,
    SamplingParams,
    TrainedModelConfig,
)
from aligner.errors import ConfigError
from aligner.models.gpt.candidates import best_candidates, candidate_logprobs
from aligner.models.gpt.generation import GenerationOutput, Generator
from aligner.models.gpt.given_settings import SectionType
from aligner.models.gpt.hidden_states import full_hidden_states, output_weight
from aligner.models.gpt.megatron import MegatronGPTModel
from aligner.models.gpt.pipeline import (
    ForwardStep,
    Microbatch,
    MicroBatches,
    forward_step,
    loss_head,
)
from aligner.models.gpt.reference import ReferencePolicy
from aligner.models.gpt.rollout import TokenListener
from aligner.models.gpt.token_logprobs import token_logits, token_logprobs
from aligner.models.interfaces import AlignableGenerativeInterface
from aligner.types import Denominators, LossFunction, TokenOutputs


class MegatronGPTActorModel(MegatronGPTModel, AlignableGenerativeInterface):
    """PPO's actor.

    ``loss_fn`` is any `aligner.types.LossFunction` over log-probs; with another loss the same
    class is another algorithm's actor.
    """

    role_name = "policy"
    config_types: ClassVar[tuple[SectionType, ...]] = (
        ModelConfig,
        RSModelConfig,
        TrainedModelConfig,
    )
    _generator: Generator | None = None

    def __init__(self, cfg: Any, trainer: Any = None, **options: Any) -> None:
        """Arguments as of `MegatronGPTModel`; the settings say how it draws, too."""
        super().__init__(cfg, trainer, **options)
        self.__dict__["_reference"] = None  # not a module of this one: it is not trained with it
        settings = self.settings
        self.configure_generation(
            settings.length_params, settings.sampling_params, settings.rollout_micro_batch_size
        )

    # Scoring ----------------------------------------------------------------------------------

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Log-probs (and entropy) where ``token_mask`` is 1."""
        columns, tp_group = microbatch.columns, self.vocab_group
        rows = full_hidden_states(gpt, hidden, vocab_parallel=True)
        if "teacher_topk_indices" in columns:
            return candidate_logprobs(
                rows,
                output_weight(gpt),
                columns["teacher_topk_indices"],
                columns["token_mask"],
                microbatch.layout,
                vocab_size=self.architecture.vocab_size,
                tp_group=tp_group,
                temperature=self.sampling_params.temperature,
                with_entropy=with_entropy,
            )
        return token_logprobs(
            rows,
            output_weight(gpt),
            columns["input_ids"],
            columns["token_mask"],
            microbatch.layout,
            vocab_size=self.architecture.vocab_size,
            tp_group=tp_group,
            sampling=self.sampling_params,
            with_entropy=with_entropy,
        )

    def loss_step(self, loss_fn: LossFunction, denominators: Denominators) -> ForwardStep:
        """megatron-core's forward step, for losses that read all logits too."""
        if not reads_logits(loss_fn):
            return super().loss_step(loss_fn, denominators)
        gpt = self.gpt

        def outputs(hidden: Tensor, microbatch: Microbatch) -> TokenOutputs:
            logits = token_logits(
                full_hidden_states(gpt, hidden, vocab_parallel=True),
                output_weight(gpt),
                microbatch.layout,
                vocab_size=self.architecture.vocab_size,
                tp_group=self.vocab_group,
                temperature=self.sampling_params.temperature,
            )
            return TokenOutputs(logits)

        return partial(forward_step, head=loss_head(outputs, loss_fn, denominators))

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
        return self.reference.get_logprobs(batch, micro_batches)

    @property
    def reference(self) -> ReferencePolicy:
        """The policy that training began with; `ConfigError` before `keep_reference`."""
        found: ReferencePolicy | None = self.__dict__["_reference"]
        if found is None:
            raise ConfigError(
                "no reference policy was kept: call keep_reference() right after the weights are "
                "loaded (a run does so when a KL coefficient is above 0)"
            )
        return found

    def get_topk_logits(
        self,
        batch: Mapping[str, Tensor],
        k: int,
        vocab_size: int,
        micro_batches: MicroBatches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The ``k`` likeliest tokens at each position, among the first ``vocab_size``.

        ``batch`` as of `get_logprobs`. Returns their logits over the sampling temperature, float32
        ``[B, S, k]`` in descending order, and their ids, int64 ``[B, S, k]``: position t speaks of
        token t. 0 where ``token_mask`` is 0.
        """
        gpt = self.gpt

        def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
            return best_candidates(
                full_hidden_states(gpt, hidden, vocab_parallel=True),
                output_weight(gpt),
                microbatch.columns["token_mask"],
                microbatch.layout,
                count=k,
                vocab_size=vocab_size,
                tp_group=self.vocab_group,
                temperature=self.sampling_params.temperature,
            )

        ids = batch["input_ids"].new_zeros(*batch["input_ids"].shape, k)
        logits = torch.zeros(ids.shape, device=ids.device)
        self.infer_frames(batch, head, [logits, ids], micro_batches)
        return logits, ids

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """Freeze the current weights as the reference policy; with adapters ``mode`` is moot."""
        kind: Literal["keep", "swap", "bare"] = mode
        if self.adapters is not None:  # what is frozen needs no keeping
            kind = "bare" if self.adapters.are_fresh else "swap"
        build = partial(self.build_gpt, initialize=False)
        self.__dict__["_reference"] = ReferencePolicy(self.gpt, kind, self.infer_tokens, build)

    def get_inference_log_probs(self, response_tokens: Tensor) -> Tensor:
        """Log-probs of every token: int64 ``[B, S]`` to float32 ``[B, S]``, 0 at position 0."""
        return self.get_logprobs(_all_positions(response_tokens))

    def get_init_policy_logprobs(self, response_tokens: Tensor) -> Tensor:
        """As `get_inference_log_probs`, under the weights that training began with."""
        return self.get_reference_logprobs(_all_positions(response_tokens))

    # Generating -------------------------------------------------------------------------------

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Set how `infer` generates; the sampling temperature also applies to all log-probs."""
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
        """Continue right-padded prompts; see `aligner.models.gpt.generation.Generator`."""
        if self._generator is None:
            self._generator = self._build_generator()
        return self._generator.generate(
            prompts,
            prompt_lengths,
            sample_ids,
            seed=seed,
            greedy=greedy,
            drawing=drawing,
            listener=listener,
        )

    def infer(
        self, inference_batch: Mapping[str, Tensor], *, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Continue prompts.

        Args:
            inference_batch: ``text`` int64 ``[B, P]`` right-padded prompts, ``length`` int64
                ``[B]``.
            seed: of counter-based sampling; default the role's. Row b is sample b.

        Returns:
            ``response_tokens`` int64 ``[B, S]`` (prompt and response), ``response_lengths`` int64
            ``[B]`` (prompt + response), ``prompt_lengths`` int64 ``[B]``, ``is_end`` bool ``[B]``.
        """
        text, length = inference_batch["text"], inference_batch["length"]
        output = self.generate(
            text,
            length,
            torch.arange(text.shape[0], device=text.device),
            seed=self.settings.seed if seed is None else seed,
        )
        return {
            "response_tokens": output.tokens,
            "response_lengths": output.lengths,
            "prompt_lengths": output.prompt_lengths,
            "is_end": output.is_end,
        }

    def _build_generator(self) -> Generator:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: the model was built without one; generation needs it")
        return Generator(
            self.gpt,
            self.architecture,
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.with_end_tokens(self.sampling_params.end_tokens).end_ids,
            pad_id=self.tokenizer.pad_id,
            length=self.length_params,
            sampling=self.sampling_params,
            max_batch_size=self.rollout_micro_batch_size,
            cuda_graphs=self.settings.cuda_graphs,
        )


def _all_positions(tokens: Tensor) -> dict[str, Tensor]:
    rows, length = tokens.shape
    return {
        "input_ids": tokens,
        "input_lengths": torch.full((rows,), length, device=tokens.device),
        "token_mask": torch.ones(rows, length, device=tokens.device),
    }
