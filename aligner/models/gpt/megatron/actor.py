"""Policy on megatron-core: samples responses, scores tokens, and trains."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView
from aligner.config import ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.device.counter_hash import CallSeeds
from aligner.logprobs.output_layer import output_weight
from aligner.losses.interfaces import AnyLossFunction
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.gpt.forward.schedule import MicroBatches, full_hidden_states
from aligner.models.gpt.forward.token_logprobs import LogitsForm
from aligner.models.gpt.megatron.model import MegatronGPTModel
from aligner.models.gpt.role.policy import SamplingPolicy
from aligner.models.gpt.role.settings import SectionType
from aligner.models.interfaces import AlignableGenerativeInterface


class MegatronGPTActorModel(MegatronGPTModel, SamplingPolicy, AlignableGenerativeInterface):
    """Policy on megatron-core, for PPO or, with another loss function, for other algorithms."""

    role_name = "policy"
    config_types: ClassVar[tuple[SectionType, ...]] = (
        ModelConfig,
        RSModelConfig,
        TrainedModelConfig,
    )

    def __init__(self, cfg: Any, trainer: Any = None, **options: Any) -> None:
        """Build the policy as in `MegatronGPTModel`, and configure its sampling from settings."""
        super().__init__(cfg, trainer, **options)
        self._call_seeds = CallSeeds(self.settings.seed)
        self.logits_form = LogitsForm(cap=self.architecture.logits_cap)
        self.configure_sampling()

    # Scoring ----------------------------------------------------------------------------------

    def output_layer(self, model: GPTModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `SamplingPolicy.output_layer`."""
        return full_hidden_states(model, hidden, vocab_parallel=True), output_weight(model)

    def trained_weights(self) -> dict[str, Tensor]:
        """See `SamplingPolicy.trained_weights`."""
        weights = self.gpt.named_parameters()
        return {name: weight for name, weight in weights if weight.requires_grad}

    @torch.no_grad()
    def copied_model(self) -> GPTModel:
        """See `SamplingPolicy.copied_model`."""
        gpt, weights = self.build_gpt(initialize=False), dict(self.gpt.named_parameters())
        for name, parameter in gpt.named_parameters():
            parameter.copy_(weights[name])
        return gpt

    def get_inference_log_probs(self, response_tokens: Tensor) -> Tensor:
        """Return log-probs of int64 ``[B, S]`` tokens, float32 ``[B, S]``, 0 at position 0."""
        return self.get_logprobs(_all_positions(response_tokens))

    def get_init_policy_logprobs(self, response_tokens: Tensor) -> Tensor:
        """Score tokens as `get_inference_log_probs` does, under the initial weights."""
        return self.get_reference_logprobs(_all_positions(response_tokens))

    # Generating -------------------------------------------------------------------------------

    def model_to_sample_from(self) -> GPTModel:
        """Return the policy's model."""
        return self.gpt

    def hugging_face_weights(self) -> HuggingFaceView:
        """See `SamplingPolicy.hugging_face_weights`."""
        family, _ = config_to_hf(self.architecture)
        return HuggingFaceView(self.gathered_weights, family.table, self.architecture)

    def infer(
        self, inference_batch: Mapping[str, Tensor], *, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Sample responses to prompts. Without ``seed``, every call draws other samples.

        Args:
            inference_batch: prompts ``text``, int64 ``[B, P]``, right-padded, and their ``length``,
                int64 ``[B]``.
            seed: seed of the random numbers. Row b has the same numbers in any batch.

        Returns:
            ``response_tokens`` int64 ``[B, S]`` (prompt and response), ``response_lengths`` int64
            ``[B]`` (prompt + response), ``prompt_lengths`` int64 ``[B]``, ``is_end`` bool ``[B]``.
        """
        text, length = inference_batch["text"], inference_batch["length"]
        output = self.generator.sample(
            text,
            length,
            torch.arange(text.shape[0], device=text.device),
            seed=self._call_seeds.next() if seed is None else seed,
        )
        return {
            "response_tokens": output.tokens,
            "response_lengths": output.lengths,
            "prompt_lengths": output.prompt_lengths,
            "is_end": output.is_end,
        }


def _all_positions(tokens: Tensor) -> dict[str, Tensor]:
    rows, length = tokens.shape
    return {
        "input_ids": tokens,
        "input_lengths": torch.full((rows,), length, device=tokens.device),
        "token_mask": torch.ones(rows, length, device=tokens.device),
    }


class MegatronGPTRSModel(MegatronGPTActorModel):
    """Policy whose default loss is the negative mean log-prob of the response's tokens."""

    config_types = (RSModelConfig, ModelConfig, TrainedModelConfig)
    loss_fn = NegativeLogLikelihoodLoss()

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: AnyLossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> dict[str, float]:
        """See `RoleModel.run_batch`. ``batch`` may also be a result of `infer`."""
        if "response_tokens" in batch:
            batch = training_columns(batch)
        return super().run_batch(batch, forward_only, loss_fn, mbs)


def training_columns(rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a result of `MegatronGPTActorModel.infer` to training columns.

    ``token_mask``, float32 ``[B, S]``, is 1 in the response, and ``sample_mask``, float32 ``[B]``,
    is 1.
    """
    tokens, lengths = rollout["response_tokens"], rollout["response_lengths"]
    position = torch.arange(tokens.shape[1], device=tokens.device)
    in_response = (position >= rollout["prompt_lengths"][:, None]) & (position < lengths[:, None])
    return {
        "input_ids": tokens,
        "input_lengths": lengths,
        "token_mask": in_response.float(),
        "sample_mask": torch.ones(tokens.shape[0], device=tokens.device),
    }
