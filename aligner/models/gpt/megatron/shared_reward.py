"""A reward model in the critic's body: one body is resident, and weights take turns in it.

scoring   critic's weights to the host, reward model's in ─► rewards ─► and back
else      reward model's weights in host memory; the body is the critic's
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
from aligner.models.gpt.role.held_weights import HeldWeights
from aligner.models.gpt.role.settings import RoleSettings


class SharedBodyRewardModel(MegatronGPTRewardModel):
    """Scores with its own weights in a body that is a critic's otherwise; it never learns.

    The two must have one architecture (`body_differences`). The head, a few numbers, is its own.
    """

    def __init__(self, *args: Any, body: GPTModel, **kwargs: Any) -> None:
        """``body``: the critic's; arguments as in `MegatronGPTRewardModel`."""
        self.__dict__["_body"] = body  # before there is a module that it could be registered in
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
        """Load a reward model by way of ``critic``'s body, which has its own weights afterwards."""
        body = critic.gpt
        critics_head = getattr(body, "rm_head", None)
        critics = HeldWeights(_without_head(body))
        try:
            model = cls.from_checkpoint(
                checkpoint, settings=settings, tokenizer=tokenizer, body=body
            )
            model._head = getattr(body, "rm_head", None)
            model._weights = HeldWeights(_without_head(body))
        finally:
            critics.exchange()
            _put_head(body, critics_head)
        critic.rewards_of = model.infer
        return model

    def build_gpt(self, initialize: bool) -> GPTModel:
        """The critic's body with a head of this model's own."""
        assert not initialize  # the weights come out of a file
        self.add_head(self._body)
        return self._body

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        gpt: GPTModel | None = None,
    ) -> Tensor:
        """See `MegatronGPTModel.infer_tokens`; meanwhile the body holds this model's weights."""
        with self._moved_in():
            return super().infer_tokens(batch, micro_batches, gpt)

    @contextlib.contextmanager
    def _moved_in(self) -> Iterator[None]:
        critics_head = getattr(self._body, "rm_head", None)
        with self._weights.in_place(), adapters_off(self._body):  # adapters are the critic's
            _put_head(self._body, self._head)
            try:
                yield
            finally:
                _put_head(self._body, critics_head)


def _without_head(gpt: GPTModel) -> dict[str, Tensor]:
    return {name: value for name, value in gpt.named_parameters() if "rm_head." not in name}


def _put_head(gpt: GPTModel, head: Any) -> None:
    """Stages before the last have none."""
    if head is not None:
        gpt.rm_head = head
