"""The output layer on this process: its rows, products with them, and modules in its place.

A module in its place hands hidden states out of a megatron-core GPTModel instead of logits.

Shape legend: ``N`` selected tokens, ``S`` length, ``B`` sequences, ``H`` hidden, ``V`` real
vocabulary, ``V_local`` rows of the local weight (padding rows included).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aligner.kernels.linear_product import has_wide_products, wide_mm

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


# Logits exist one tile [rows, columns] at a time. On CPU a tile must fit in the cache, else every
# pass over it goes to memory (benchmarks/LOG.md, 2026-11-21); an accelerator wants large launches.
_TILE_BYTES = {"cpu": 4 * 2**20}
_TILE_BYTES_ACCELERATOR = 256 * 2**20
_TILE_ROWS = {"cpu": 2048}
_TILE_ROWS_ACCELERATOR = 8192
# Logits that are there already are read in chunks of whole rows.
_CHUNK_BYTES = {"cpu": 32 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 256 * 2**20


def tile_bytes(device_type: str) -> int:
    """Most bytes of one float32 tile of logits on devices of this type."""
    return _TILE_BYTES.get(device_type, _TILE_BYTES_ACCELERATOR)


@dataclass(frozen=True)
class VocabShard:
    """Part of the vocabulary that the local weight holds.

    ``start``: global id of its row 0. ``columns``: how many of its first rows are real tokens;
    what follows is padding and takes no part in the softmax. ``group``: the tensor-parallel group,
    None where this process holds the whole vocabulary.
    """

    start: int
    columns: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard of float ``weight`` [V_local, H], where each rank holds V_local rows."""
        rows = weight.shape[0]
        ranks = 1 if group is None else dist.get_world_size(group)
        assert 0 < vocab_size <= rows * ranks, (vocab_size, rows, ranks)
        start = 0 if group is None else rows * dist.get_rank(group)
        columns = min(max(vocab_size - start, 0), rows)
        return cls(start=start, columns=columns, group=group if ranks > 1 else None)

    @classmethod
    def between(cls, start: int, end: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard whose first columns are the global ids from ``start`` up to ``end``."""
        ranks = 1 if group is None else dist.get_world_size(group)
        return cls(start=start, columns=end - start, group=group if ranks > 1 else None)

    def localize(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Local row of each global id, and whether it is here: int64 [...] to int64 and bool [...].

        The row of an id that another rank holds is 0.
        """
        local = target - self.start
        owned = (local >= 0) & (local < self.columns)
        return torch.where(owned, local, 0), owned

    def sum(self, value: Tensor) -> Tensor:
        """Sum of ``value``, float [...], over the group, in place."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def maximum(self, value: Tensor) -> Tensor:
        """Maximum of ``value``, float [...], over the group, in place."""
        if self.group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def stack_ranks(self, value: Tensor) -> Tensor:
        """``value`` of every rank, [ranks, ...]; each rank has the same shape and dtype."""
        if self.group is None:
            return value.unsqueeze(0)
        ranks = dist.get_world_size(self.group)
        stacked = value.new_empty(ranks, *value.shape)
        dist.all_gather(list(stacked), value.contiguous(), group=self.group)
        return stacked


def sequence_chunks(logits: Tensor, chunk_size: int | None) -> Iterator[slice]:
    """Slices of the last but one dimension of [..., S, V_local], ``chunk_size`` positions each.

    None: as many as keep a chunk's float32 form within the memory of some tiles. The same on every
    rank whose logits have the same shape, so that collectives may stand inside the loop.
    """
    length = logits.shape[-2]
    if chunk_size is None:
        budget = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ACCELERATOR)
        chunk_size = budget // max(1, logits.numel() // max(1, length) * torch.float32.itemsize)
    size = max(1, chunk_size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Tiles:
    """Cuts [N, columns] into tiles whose memory is bounded and reused.

    ``dtype`` is the type of the arithmetic, float32 at least. Inputs of lower precision are
    converted block by block, so products accumulate in float32 without a float32 copy of the
    weight, or not at all where the device multiplies them as they are (``narrow``).
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        columns: int,
        chunk_size: int | None,
        divisor: float = 1.0,
    ) -> None:
        """Tile the product of ``hidden`` [N, H] and ``weight`` [V_local, H], over ``divisor``."""
        device = hidden.device
        self.narrow = has_wide_products(hidden, weight)
        self.divisor = divisor
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.rows_total, self.columns_total = hidden.shape[0], columns
        default_rows = _TILE_ROWS.get(device.type, _TILE_ROWS_ACCELERATOR)
        self.rows = max(1, min(self.rows_total, chunk_size or default_rows))
        budget = tile_bytes(device.type) // self.dtype.itemsize
        self.columns = max(1, min(columns, max(64, budget // self.rows)))
        self._buffers: dict[str, Tensor] = {}
        self._device = device

    def factor(self, matrix: Tensor) -> Tensor:
        """Hidden states [n, H] or weight rows [v, H] in the dtype in which they are multiplied."""
        return matrix if self.narrow else matrix.to(self.dtype)

    def buffer(
        self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Uninitialised [rows, columns], contiguous; the same memory for the same name."""
        if name not in self._buffers:
            size = self.rows * self.columns
            self._buffers[name] = torch.empty(size, dtype=dtype or self.dtype, device=self._device)
        return self._buffers[name][: rows * columns].view(rows, columns)

    def vocabulary(self) -> Iterator[slice]:
        """Slices of the local vocabulary, padding left out."""
        for start in range(0, self.columns_total, self.columns):
            yield slice(start, min(start + self.columns, self.columns_total))

    def tokens(self) -> Iterator[slice]:
        """Slices of the tokens."""
        for start in range(0, self.rows_total, self.rows):
            yield slice(start, min(start + self.rows, self.rows_total))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``hidden [n, H] @ weight [v, H]^T`` in float, both `factor`, into the reused tile."""
        tile = self.buffer("logits", hidden.shape[0], weight.shape[0])
        wide_mm(hidden, weight.t(), out=tile)
        return tile if self.divisor == 1.0 else tile.div_(self.divisor)


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
