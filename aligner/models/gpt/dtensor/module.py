"""A transformers model as the root of FSDP2: body, output layer or scalar head, and what follows.

Parameters carry Hugging Face's names (``model.layers.0.…``, ``lm_head.weight``); a scalar head is
``score``. What is computed from the hidden states is computed inside `forward`, where the
weights of the output layer are whole.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from aligner.models.gpt.forward.token_layout import TokenLayout
from aligner.models.gpt.role.value import ValueHead

Result = TypeVar("Result")


class TransformersModel(nn.Module):
    """A decoder's body with a language-model head, a scalar head, or neither of its own (tied)."""

    def __init__(
        self, prefix: str, body: nn.Module, lm_head: nn.Linear | None, score: ValueHead | None
    ) -> None:
        """``prefix``: Hugging Face's name of the body in a language model."""
        super().__init__()
        self._prefix = prefix
        self.add_module(prefix, body)
        self.lm_head = lm_head
        self.score = score

    @property
    def body(self) -> nn.Module:
        """The decoder: token ids to hidden states."""
        return self.get_submodule(self._prefix)

    @property
    def embedding(self) -> nn.Module:
        """The embedding of tokens."""
        return self.body.get_input_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        return next(child for child in self.body.children() if isinstance(child, nn.ModuleList))

    def forward(self, layout: TokenLayout, head: Callable[[Tensor], Result]) -> Result:
        """Result of ``head`` for the float hidden states ``[n * L, H]`` of a micro-batch's rows."""
        hidden = self.body(
            input_ids=layout.input_ids,
            position_ids=layout.positions,
            use_cache=False,
            segments=layout.segments,
        ).last_hidden_state
        return head(hidden.flatten(0, 1))

    def output_weight(self) -> Tensor:
        """Rows of the output layer on this rank, ``[ceil(V / tp), H]``; only inside `forward`.

        The last ranks hold fewer where the vocabulary does not divide: they get rows of zeros.
        """
        weight = (self.embedding if self.lm_head is None else self.lm_head).weight
        if not isinstance(weight, DTensor):
            return weight
        width = math.ceil(weight.shape[0] / weight.device_mesh.size())
        local = weight.to_local(grad_placements=[Shard(0)])
        return F.pad(local, (0, 0, 0, width - local.shape[0]))
