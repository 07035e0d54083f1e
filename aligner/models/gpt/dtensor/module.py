"""A transformers model as the root of FSDP2: body, and output layer or scalar head.

Parameters are named as in Hugging Face models, and a scalar head is named ``score``. Outputs are
computed inside of `forward`, where the weights of the output layer are gathered.
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
# How sequences are passed to a body: by aligner's attention (packed, with shared prefixes), packed
# for transformers' masks, or one in each row.
Way = Literal["aligner", "transformers", "rows"]


class TransformersModel(nn.Module):
    """Decoder body with an output layer, a scalar head, or neither (tied embeddings)."""

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
        """Join body and heads.

        Args:
            parts: modules by Hugging Face's names in a language model.
            body: name of the decoder, which maps token ids to hidden states.
            output: name of the output layer. None: with ``score`` no output layer, otherwise the
                embedding's weight.
            score: scalar head.
            layer_classes: class names of the decoder's layers (``_no_split_modules``).
            way: how a micro-batch enters the transformer (`build_sharded`).
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
        """Return the name in the body of one of its modules or parameters."""
        return name.removeprefix(f"{self._body}.")

    @property
    def embedding(self) -> nn.Module:
        """Token embedding."""
        return self.body.get_input_embeddings()

    @property
    def output_layer(self) -> nn.Module | None:
        """Output layer, None with a scalar head or if the embedding's weight is used."""
        return None if self._output is None else self.get_submodule(self._output)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of the decoder, the outermost modules of the model's classes of layers.

        Without such modules, the longest list of modules. Empty if layers share weights, so that
        they cannot be sharded one by one.
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
        """Return the result of ``head`` for a micro-batch's hidden states, float ``[n * L, H]``."""
        with running(layout.segments):
            hidden = self.body(**model_inputs(layout, self.way)).last_hidden_state
        return head(hidden.flatten(0, 1))

    def output_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states ``[n, H]`` and this rank's output layer ``[ceil(V / tp), H]``.

        Call it inside `forward`. If the vocabulary is not divisible, the last ranks' rows are
        padded with zeros. The bias of an output layer becomes a column of the weight, and the
        hidden states get a column of ones.
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
    """Return the arguments of a transformers model that runs a micro-batch in a ``way``."""
    inputs: dict[str, Any] = {"input_ids": layout.input_ids, "use_cache": False}
    if way != "rows":
        inputs["position_ids"] = layout.positions
    if way == "aligner":
        # With this mask transformers does not derive sequences from the positions.
        inputs["attention_mask"] = torch.ones_like(layout.input_ids)
    return inputs
