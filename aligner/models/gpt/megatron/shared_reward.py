"""A reward model on the critic's backbone, which is on the device once; weights are swapped in it.

scoring   critic's weights to the host, reward model's in ─► rewards ─► and back
else      reward model's weights in host memory; the backbone is the critic's
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.model_source import ModelSource
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.lora.adapters import adapters_off
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
from aligner.models.gpt.megatron.reward import MegatronGPTRewardModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.swapped_weights import SwappedWeights


class SharedBackboneRewardModel(MegatronGPTRewardModel):
    """Scores with its own weights on a backbone that is a critic's otherwise; it never learns.

    The two must have one architecture (`body_differences`). The head, a few numbers, is its own.
    """

    def __init__(self, *args: Any, backbone: GPTModel, **kwargs: Any) -> None:
        """``backbone``: the critic's; arguments as in `MegatronGPTRewardModel`."""
        self.__dict__["_backbone"] = backbone  # not registered: no module yet
        super().__init__(*args, **kwargs)

    @classmethod
    def in_critic(
        cls,
        critic: MegatronGPTCriticModel,
        checkpoint: ModelSource,
        *,
        settings: RoleSettings,
        tokenizer: Tokenizer,
    ) -> Self:
        """Load a reward model through ``critic``'s backbone, whose weights are back afterwards."""
        backbone = critic.gpt
        critics_head = getattr(backbone, "rm_head", None)
        critics = SwappedWeights(_without_head(backbone))
        try:
            model = cls.from_checkpoint(
                checkpoint, settings=settings, tokenizer=tokenizer, backbone=backbone
            )
            model._head = getattr(backbone, "rm_head", None)
            model._weights = SwappedWeights(_without_head(backbone))
        finally:
            critics.exchange()
            _put_head(backbone, critics_head)
        critic.rewards_of = model.infer
        return model

    def build_gpt(self, initialize: bool) -> GPTModel:
        """The critic's backbone with a head of this model's own."""
        assert not initialize  # the weights come out of a file
        self.add_head(self._backbone)
        return self._backbone

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: GPTModel | None = None,
    ) -> Tensor:
        """See `RoleModel.infer_tokens`; meanwhile the backbone holds this model's weights."""
        with self._swapped_in():
            return super().infer_tokens(batch, micro_batches, model)

    @contextlib.contextmanager
    def _swapped_in(self) -> Iterator[None]:
        critics_head = getattr(self._backbone, "rm_head", None)
        with self._weights.in_place(), adapters_off(self._backbone):  # adapters are the critic's
            _put_head(self._backbone, self._head)
            try:
                yield
            finally:
                _put_head(self._backbone, critics_head)


def _without_head(gpt: GPTModel) -> dict[str, Tensor]:
    return {name: value for name, value in gpt.named_parameters() if "rm_head." not in name}


def _put_head(gpt: GPTModel, head: Any) -> None:
    """Stages before the last have none."""
    if head is not None:
        gpt.rm_head = head
