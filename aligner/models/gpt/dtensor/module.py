"""A transformers model as the root of FSDP2: body, and output layer or scalar head.

Parameters are named as in Hugging Face models (``model.layers.0.…``, ``lm_head.weight``). A scalar
head is named ``score``. Outputs are computed from the hidden states inside of `forward`, where the
weights of the output layer are gathered.
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
    """Decoder body with a language-model head, a scalar head, or neither (tied embeddings)."""

    def __init__(
        self, prefix: str, body: nn.Module, lm_head: nn.Linear | None, score: ValueHead | None
    ) -> None:
        """Join body and heads. ``prefix``: Hugging Face's name of the body in a language model."""
        super().__init__()
        self._prefix = prefix
        self.add_module(prefix, body)
        self.lm_head = lm_head
        self.score = score

    @property
    def body(self) -> nn.Module:
        """Decoder, which maps token ids to hidden states."""
        return self.get_submodule(self._prefix)

    @property
    def embedding(self) -> nn.Module:
        """Token embedding."""
        return self.body.get_input_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """Layers of the decoder."""
        return next(child for child in self.body.children() if isinstance(child, nn.ModuleList))

    def forward(self, layout: TokenLayout, head: Callable[[Tensor], Result]) -> Result:
        """Return the result of ``head`` for a micro-batch's hidden states, float ``[n * L, H]``."""
        hidden = self.body(
            input_ids=layout.input_ids,
            position_ids=layout.positions,
            use_cache=False,
            segments=layout.segments,
        ).last_hidden_state
        return head(hidden.flatten(0, 1))

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, ``[ceil(V / tp), H]``, inside `forward`.

        If the vocabulary is not divisible, the last ranks' rows are padded with zeros.
        """
        weight = (self.embedding if self.lm_head is None else self.lm_head).weight
        if not isinstance(weight, DTensor):
            return weight
        width = math.ceil(weight.shape[0] / weight.device_mesh.size())
        local = weight.to_local(grad_placements=[Shard(0)])
        return F.pad(local, (0, 0, 0, width - local.shape[0]))
