"""`TransformersModel`: the module that FSDP2 shards, a decoder with an output layer or a head.

Parameters have the names of Hugging Face models. A head is named ``score``. `forward` also computes
the role's outputs, because FSDP2 gathers the output layer's weights only during `forward`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from aligner.checkpoint.adapters import AdaptedWeight
from aligner.logprobs.output_layer import ValueHead
from aligner.models.gpt.dtensor.attention import running
from aligner.models.gpt.forward.token_layout import TokenLayout

Result = TypeVar("Result")
# How the sequences of a micro-batch are passed to the decoder. "aligner": packed, with shared
# prefixes, for aligner's attention. "transformers": packed, for transformers' attention masks.
# "rows": one sequence per row.
Way = Literal["aligner", "transformers", "rows"]


class TransformersModel(nn.Module):
    """Decoder with an output layer, with a head, or with neither (tied embeddings)."""

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        body: str,
        *,
        output: str | None = None,
        score: ValueHead | None = None,
        layer_classes: frozenset[str] = frozenset(),
        way: Way = "aligner",
    ) -> None:
        """Build the module from parts of a Hugging Face language model.

        Args:
            parts: child modules by their Hugging Face names.
            body: dotted name of the decoder, which maps token ids to hidden states.
            output: dotted name of the output layer. None: the model has a head, or uses the
                embedding's weight as output layer.
            score: head, instead of an output layer.
            layer_classes: class names of the decoder's layers (``_no_split_modules``).
            way: how sequences are passed to the decoder (see `Way`).
        """
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._body, self._output, self._layer_classes = body, output, layer_classes
        self.score = score
        self.way: Way = way
        self.adapted: list[AdaptedWeight] = []

    @property
    def body(self) -> nn.Module:
        """Decoder, which maps token ids to hidden states."""
        return self.get_submodule(self._body)

    def in_body(self, name: str) -> str:
        """Remove the prefix of `body` from the name of a module or parameter."""
        return name.removeprefix(f"{self._body}.")

    @property
    def embedding(self) -> nn.Module:
        """Token embedding."""
        return self.body.get_input_embeddings()

    @property
    def output_layer(self) -> nn.Module | None:
        """Output layer. None if the model has a head, or uses the embedding's weight instead."""
        return None if self._output is None else self.get_submodule(self._output)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of the decoder, which are sharded one by one. Empty if layers share weights.

        These are the outermost modules of the classes ``layer_classes``. If there are none, they
        are the modules in the longest ``ModuleList``.
        """
        layers: list[nn.Module] = []
        inner: set[nn.Module] = set()
        for module in self.body.modules():
            if type(module).__name__ in self._layer_classes and module not in inner:
                layers.append(module)
                inner.update(module.modules())
        if not layers:
            lists = [m for m in self.body.modules() if isinstance(m, nn.ModuleList)]
            layers = list(max(lists, key=len, default=[]))
        parameters = [p for layer in layers for p in layer.parameters()]
        return layers if len(set(parameters)) == len(parameters) else []

    def forward(self, layout: TokenLayout, head: Callable[[Tensor], Result]) -> Result:
        """Run a micro-batch. Returns ``head`` of the final hidden states, float ``[n * L, H]``."""
        with running(layout.segments):
            hidden = self.body(**model_inputs(layout, self.way)).last_hidden_state
        return head(hidden.flatten(0, 1))

    def output_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return two factors whose product are the logits of this rank's vocabulary shard.

        The factors are hidden states ``[n, H]`` and weights ``[ceil(V / tp), H]``, on the last
        ranks padded with zeros. A bias becomes an additional column of the weights, and the hidden
        states then get a column of ones. Call this inside `forward`.
        """
        layer = self.embedding if self.output_layer is None else self.output_layer
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if isinstance(weight, DTensor):
            width = math.ceil(weight.shape[0] / weight.device_mesh.size())
            weight = weight.to_local(grad_placements=[Shard(0)])
            weight = F.pad(weight, (0, 0, 0, width - weight.shape[0]))
            if bias is not None:
                bias = bias.to_local(grad_placements=[Shard(0)])
                bias = F.pad(bias, (0, width - bias.shape[0]))
        if bias is None:
            return hidden, weight
        return F.pad(hidden, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], 1)


def model_inputs(layout: TokenLayout, way: Way) -> dict[str, Any]:
    """Return the keyword arguments with which a transformers model runs a micro-batch."""
    inputs: dict[str, Any] = {"input_ids": layout.input_ids, "use_cache": False}
    if way != "rows":
        inputs["position_ids"] = layout.positions
    if way == "aligner":
        # With this mask transformers does not derive sequences from the positions.
        inputs["attention_mask"] = torch.ones_like(layout.input_ids)
    return inputs
