"""Final hidden states out of a megatron-core GPTModel, without ever computing its logits.

The output layer is bypassed during the forward pass; what needs the vocabulary then works on
selected positions only (`aligner.distributed.model_utils.hidden_states_to_logprobs`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.logprobs.output_layer import (
    OutputLayerBypass,
    bypassed_output_layer,
    output_weight,
)
from aligner.models.gpt.forward.token_layout import TokenLayout

__all__ = [
    "OutputLayerBypass",
    "bypassed_output_layer",
    "full_hidden_states",
    "output_weight",
    "placed_positions",
]


class PlacedRotary(nn.Module):
    """Stands where the rotary embedding was and answers for the positions of one layout.

    megatron-core's own counts from the start of the row, or cuts it as it would be cut for
    Transformer Engine.
    """

    def __init__(self, rotary: nn.Module, layout: TokenLayout) -> None:
        super().__init__()
        self.angles = rotary.get_emb(layout.longest)[layout.positions[0]]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Length to ask `forward` for; it does not matter."""
        del args, kwargs
        return self.angles.shape[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Angles ``[L, 1, 1, D]`` of the layout's rows."""
        del args, kwargs
        return self.angles


@contextlib.contextmanager
def placed_positions(gpt: GPTModel, layout: TokenLayout) -> Iterator[None]:
    """Give rotary embeddings the layout's positions; without segments they are those anyway."""
    original = gpt._modules.get("rotary_pos_emb")
    if layout.segments is None or original is None:
        yield
        return
    gpt._modules["rotary_pos_emb"] = PlacedRotary(original, layout)
    try:
        yield
    finally:
        gpt._modules["rotary_pos_emb"] = original


def full_hidden_states(gpt: GPTModel, hidden: Tensor, *, vocab_parallel: bool) -> Tensor:
    """Undo sequence parallelism on float ``[n, L, H]`` and place the tensor-parallel gradient sum.

    Returns ``[n * L, H]``, the rows that `TokenLayout` counts.

    ``vocab_parallel``: what follows is sharded over the vocabulary, so each rank's gradient is a
    partial one that must be summed. Otherwise every rank computes the same and none is summed.
    """
    if gpt.config.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(
            hidden.transpose(0, 1), tensor_parallel_output_grad=vocab_parallel
        )
        return gathered.transpose(0, 1).flatten(0, 1)
    rows = hidden.flatten(0, 1)
    return copy_to_tensor_model_parallel_region(rows) if vocab_parallel else rows
