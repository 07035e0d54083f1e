"""Reward models: a GPT body whose scalar head scores a whole sequence at its last token.

Training them is not part of this version; a `.nemo` reward model restores into this class with
the ``rm_head`` it brings.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from aligner.models.gpt.critic import MegatronGPTCriticModel


class MegatronGPTRewardModel(MegatronGPTCriticModel):
    """Scores sequences; the head's output is not shifted, it speaks of the token just read."""

    role_name = "reward model"
    right_shift = False

    def infer(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Reward of each sequence, float32 ``[B]``: the head's output at the last valid token."""
        scores = self.infer_tokens(batch)
        last = batch["input_lengths"].long() - 1
        return scores.gather(1, last[:, None]).squeeze(1)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rewards ``[B]`` under the key ``rewards``."""
        return {"rewards": torch.as_tensor(self.infer(batch))}
