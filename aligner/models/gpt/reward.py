"""Reward models: a GPT body whose scalar head scores a whole sequence at its last token.

Training them is not part of this version; a `.nemo` reward model restores into this class with
the ``rm_head`` it brings.
"""

from collections.abc import Mapping

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.models.gpt.critic import MegatronGPTCriticModel, head_output
from aligner.models.gpt.pipeline import Microbatch
from aligner.types import TokenOutputs


class MegatronGPTRewardModel(MegatronGPTCriticModel):
    """Scores sequences; the head's output is not shifted, it speaks of the token just read."""

    role_name = "reward model"

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Raw head output of every token."""
        assert not with_entropy
        rows, tokens = microbatch.layout.held_tokens()
        return TokenOutputs(microbatch.layout.to_frame(head_output(gpt, hidden)[rows], tokens))

    def infer(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Reward of each sequence, float32 ``[B]``: the head's output at the last valid token."""
        scores = self.infer_tokens(batch)
        last = batch["input_lengths"].long() - 1
        return scores.gather(1, last[:, None]).squeeze(1)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rewards ``[B]`` under the key ``rewards``."""
        return {"rewards": torch.as_tensor(self.infer(batch))}
