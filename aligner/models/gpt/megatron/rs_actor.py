"""Rejection sampling's actor: the same policy, learning its best responses by likelihood."""

from collections.abc import Mapping

import torch
from torch import Tensor

from aligner.config import ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.megatron.actor import MegatronGPTActorModel
from aligner.models.gpt.role.model import BatchResult
from aligner.types import LossFunction


class MegatronGPTRSModel(MegatronGPTActorModel):
    """PPO's actor with another loss: the negative mean log-prob of the response's tokens."""

    config_types = (RSModelConfig, ModelConfig, TrainedModelConfig)
    loss_fn = NegativeLogLikelihoodLoss()

    def run_batch(
        self,
        batch: Mapping[str, Tensor],
        forward_only: bool,
        loss_fn: LossFunction | None = None,
        mbs: MicroBatches | None = None,
    ) -> BatchResult:
        """See `MegatronGPTModel.run_batch`.

        ``batch`` has the columns of `aligner.types`, or is what `infer` returns.
        """
        if "response_tokens" in batch:
            batch = training_columns(batch)
        return super().run_batch(batch, forward_only, loss_fn, mbs)


def training_columns(rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns to learn from, of responses that `MegatronGPTActorModel.infer` returned.

    ``rollout``: ``response_tokens`` int64 ``[B, S]``; ``response_lengths`` and ``prompt_lengths``
    int64 ``[B]``. The float32 ``token_mask`` ``[B, S]`` follows from the lengths: 1 from
    ``prompt_lengths`` to ``response_lengths``; ``sample_mask`` is 1.
    """
    tokens, lengths = rollout["response_tokens"], rollout["response_lengths"]
    position = torch.arange(tokens.shape[1], device=tokens.device)
    learned = (position >= rollout["prompt_lengths"][:, None]) & (position < lengths[:, None])
    return {
        "input_ids": tokens,
        "input_lengths": lengths,
        "token_mask": learned.float(),
        "sample_mask": torch.ones(tokens.shape[0], device=tokens.device),
    }
