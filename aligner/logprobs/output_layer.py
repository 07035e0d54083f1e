"""Output layer of this rank: its part of the vocabulary, tiled products, and replacements.

Shape legend: ``N`` selected tokens, ``S`` length, ``B`` sequences, ``H`` hidden, ``V`` real
vocabulary, ``V_local`` rows of the local weight (padding rows included).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from aligner.kernels.linear_product import has_wide_products, wide_mm

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


# One tile [rows, columns] of logits is in memory at a time. On a CPU it should fit in the cache
# (benchmarks/LOG.md, 2026-11-21). A GPU needs large kernels.
_TILE_BYTES = {"cpu": 4 * 2**20}
_TILE_BYTES_ACCELERATOR = 256 * 2**20
_TILE_ROWS = {"cpu": 2048}
_TILE_ROWS_ACCELERATOR = 8192
# Logits that are in memory are processed in chunks of complete rows.
_CHUNK_BYTES = {"cpu": 32 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 256 * 2**20


def tile_bytes(device_type: str) -> int:
    """Return the maximum size, in bytes, of a float32 tile of logits on this type of device."""
    return _TILE_BYTES.get(device_type, _TILE_BYTES_ACCELERATOR)


@dataclass(frozen=True)
class VocabShard:
    """Part of the vocabulary in this rank's output layer.

    ``start``: token id of row 0. ``columns``: number of rows that are tokens. Padding rows follow
    them. ``group``: tensor-parallel group, None if this rank has the whole vocabulary.
    """

    start: int
    columns: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """Return the shard in ``weight``, float [V_local, H]. V_local is equal on all ranks."""
        rows = weight.shape[0]
        ranks = 1 if group is None else dist.get_world_size(group)
        assert 0 < vocab_size <= rows * ranks, (vocab_size, rows, ranks)
        start = 0 if group is None else rows * dist.get_rank(group)
        columns = min(max(vocab_size - start, 0), rows)
        return cls(start=start, columns=columns, group=group if ranks > 1 else None)

    @classmethod
    def between(cls, start: int, end: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """Return the shard of the token ids from ``start`` to ``end`` (excluded)."""
        ranks = 1 if group is None else dist.get_world_size(group)
        return cls(start=start, columns=end - start, group=group if ranks > 1 else None)

    def localize(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's local row, int64 [...], 0 if it has none, and whether it has one."""
        local = target - self.start
        owned = (local >= 0) & (local < self.columns)
        return torch.where(owned, local, 0), owned

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value``, float [...], over the group, in place."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def maximum(self, value: Tensor) -> Tensor:
        """Compute the maximum of ``value``, float [...], over the group, in place."""
        if self.group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def stack_ranks(self, value: Tensor) -> Tensor:
        """Gather ``value`` [...] of every rank to [ranks, ...]. Shapes and dtypes must be equal."""
        if self.group is None:
            return value.unsqueeze(0)
        ranks = dist.get_world_size(self.group)
        stacked = value.new_empty(ranks, *value.shape)
        dist.all_gather(list(stacked), value.contiguous(), group=self.group)
        return stacked


def sequence_chunks(logits: Tensor, chunk_size: int | None) -> Iterator[slice]:
    """Yield slices of S in ``logits`` [..., S, V_local]. The default size is a memory limit."""
    length = logits.shape[-2]
    if chunk_size is None:
        budget = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ACCELERATOR)
        chunk_size = budget // max(1, logits.numel() // max(1, length) * torch.float32.itemsize)
    size = max(1, chunk_size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Tiles:
    """Partition of the logits ``hidden`` [N, H] @ ``weight`` [V_local, H]^T into tiles.

    All tiles use the same memory. ``dtype``: dtype of the arithmetic, float32 or float64.
    ``narrow``: whether the device multiplies bfloat16 directly. Otherwise inputs are converted
    block by block. Logits are divided by ``divisor`` and bounded by ``cap``.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        columns: int,
        chunk_size: int | None,
        divisor: float = 1.0,
        cap: float | None = None,
    ) -> None:
        device = hidden.device
        self.narrow = has_wide_products(hidden, weight)
        self.divisor, self.cap = divisor, cap
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.rows_total, self.columns_total = hidden.shape[0], columns
        default_rows = _TILE_ROWS.get(device.type, _TILE_ROWS_ACCELERATOR)
        self.rows = max(1, min(self.rows_total, chunk_size or default_rows))
        budget = tile_bytes(device.type) // self.dtype.itemsize
        self.columns = max(1, min(columns, max(64, budget // self.rows)))
        self._buffers: dict[str, Tensor] = {}
        self._device = device

    def factor(self, matrix: Tensor) -> Tensor:
        """Convert hidden states [n, H] or weight rows [v, H] to the dtype of the product."""
        return matrix if self.narrow else matrix.to(self.dtype)

    def buffer(
        self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return an uninitialised tensor [rows, columns] in the memory of the buffer ``name``."""
        if name not in self._buffers:
            size = self.rows * self.columns
            self._buffers[name] = torch.empty(size, dtype=dtype or self.dtype, device=self._device)
        return self._buffers[name][: rows * columns].view(rows, columns)

    def vocabulary(self) -> Iterator[slice]:
        """Yield the slices of the local vocabulary, without padding."""
        for start in range(0, self.columns_total, self.columns):
            yield slice(start, min(start + self.columns, self.columns_total))

    def tokens(self) -> Iterator[slice]:
        """Yield the slices of the N tokens."""
        for start in range(0, self.rows_total, self.rows):
            yield slice(start, min(start + self.rows, self.rows_total))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits [n, v] of a tile. Convert both inputs by `factor` first."""
        tile = self.buffer("logits", hidden.shape[0], weight.shape[0])
        wide_mm(hidden, weight.t(), out=tile)
        return soft_cap_(tile if self.divisor == 1.0 else tile.div_(self.divisor), self.cap)


def soft_cap_(logits: Tensor, cap: float | None) -> Tensor:
    """Replace float ``logits`` [...] by ``cap * tanh(logits / cap)``. None means no cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class OutputLayerBypass(nn.Module):
    """Replaces the output layer, and returns the hidden states.

    With tied embeddings, megatron-core reads ``weight`` on the last pipeline stage.
    """

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        self._original = (original,)  # a tuple hides its parameters from this module

    @property
    def weight(self) -> Tensor | None:
        """Weight of the replaced output layer."""
        return getattr(self._original[0], "weight", None)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return ``hidden``, float ``[S, B, H]``. Other arguments are ignored."""
        if self._original[0] is not None:
            ready_weight(self._original[0])
        return hidden, None


class ValueHead(nn.Module):
    """Linear head with ``outputs`` values per hidden state, in float32 in models of any dtype.

    In bfloat16, the small updates of a PPO critic would be lost by rounding. The weights of a new
    head are 0, so that all initial values are 0 on every layout.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype = torch.float32, outputs: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute values ``[..., outputs]`` in the head's dtype, from ``[..., H]`` in any dtype."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)


def ready_weight(module: nn.Module) -> Tensor:
    """Run the module's pre-forward hooks, which wait for gathered weights. Return its weight."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module.weight


class CapturingOutputLayer(nn.Module):
    """Replaces the output layer, and stores the hidden states ``[S, B, H]`` in a dict."""

    def __init__(self, captured_hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.captured_hidden = captured_hidden

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Store ``hidden_states``, float ``[S, B, H]``, and return a placeholder ``[S, B, 1]``."""
        self.captured_hidden["hidden_states"] = hidden_states
        return hidden_states[..., :1], None


@contextlib.contextmanager
def bypassed_output_layer(gpt: "GPTModel") -> Iterator[None]:
    """Make the last pipeline stage return hidden states ``[B, S, H]`` inside the block."""
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
    """Return this rank's rows of the output layer or tied embedding, ``[V / tp, H]``."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight
