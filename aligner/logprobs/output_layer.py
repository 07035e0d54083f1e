"""Hidden states out of a megatron-core GPTModel in place of its logits."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class OutputLayerBypass(nn.Module):
    """Stands where the output layer was and hands the hidden states through.

    ``weight``: megatron-core reads it on the last pipeline stage when embeddings are tied.
    """

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple: its weight is no parameter of this module

    @property
    def weight(self) -> Tensor | None:
        """Weight of the output layer that this one stands for."""
        return getattr(self._original[0], "weight", None)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Ignore the arguments of an output layer; float ``[S, B, H]`` in and out."""
        del args, kwargs
        if self._original[0] is not None:
            weight_is_read(self._original[0])
        return hidden, None


def weight_is_read(module: nn.Module) -> Tensor:
    """The module's weight, as when it is called.

    With ``overlap_param_gather`` weights arrive in the background, and a hook before each module's
    forward pass waits for its own.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module.weight


class CapturingOutputLayer(nn.Module):
    """Stands where the output layer was, keeps the hidden states, and returns next to nothing.

    ``captured_hidden``: where they are put, float ``[S, B, H]`` under ``hidden_states``.
    """

    def __init__(self, captured_hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.captured_hidden = captured_hidden

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Float ``[S, B, H]`` in, ``[S, B, 1]`` out, whose numbers nothing reads."""
        del args, kwargs
        self.captured_hidden["hidden_states"] = hidden_states
        return hidden_states[..., :1], None


@contextlib.contextmanager
def bypassed_output_layer(gpt: "GPTModel") -> Iterator[None]:
    """Let ``gpt(...)`` return hidden states ``[B, S, H]`` (on the last pipeline stage)."""
    original = gpt._modules.get("output_layer")
    if original is None or isinstance(original, OutputLayerBypass):
        yield
        return
    gpt._modules["output_layer"] = OutputLayerBypass(original)
    try:
        yield
    finally:
        gpt._modules["output_layer"] = original


def output_weight(gpt: "GPTModel") -> Tensor:
    """This rank's ``[V / tp, H]`` rows of the output layer (the embedding's, when tied)."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight
