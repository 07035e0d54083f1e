"""Layout of a micro-batch's tokens in the model, and the map of results back to the batch.

Masks, losses and results are in the frame ``[b, S]``. The model's input is the frame itself or, if
packed or under context parallelism, one long row of this rank's tokens without padding:

    frame [b, S] ─tokens─► rows [n, L] ─► model ─► hidden rows ─► head ─► frame [b, S]

The long row contains a shared prefix once (`aligner.distributed.sequences`), so that one token may
correspond to several frame indices. The hidden state of a row predicts the next token, which may be
on another rank. Every rank fills in its results, and the ranks' frames are summed.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from aligner.config import ParallelConfig
from aligner.distributed.sequences import PrefixTree, Sequences
from aligner.models.gpt.layers.segments import Segments, build_segments, take_rows
from aligner.parallel.context import IntArray, SumOverRanks, local_position
from aligner.parallel.groups import ParallelState
from aligner.types import TokenOutputs

PADDING = -1
BoolArray = NDArray[np.bool_]
Number = TypeVar("Number", int, IntArray)


@dataclass(frozen=True)
class LayoutRules:
    """Rules by which a role's micro-batches become inputs of the model."""

    packed: bool  # one long row contains all sequences
    sequence_multiple: int  # divides the padded length of each packed sequence, over all ranks
    row_multiple: int  # divides the length of the model's rows, on one rank
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None  # None: frames are not summed
    shared_prefixes: bool = False  # compute a shared prefix once

    @classmethod
    def of(
        cls,
        parallel: ParallelState,
        *,
        packed: bool,
        sequence_length_round: int,
        shared_prefixes: bool = False,
    ) -> "LayoutRules":
        """Derive the rules from a parallel layout. Context parallelism implies packing."""
        config: ParallelConfig = parallel.config
        split = config.context > 1
        return cls(
            packed=packed or split,
            sequence_multiple=config.sequence_multiple,
            row_multiple=config.row_multiple(sequence_length_round),
            cp_rank=parallel.cp_rank,
            cp_size=config.context,
            cp_group=parallel.cp_group if split else None,
            shared_prefixes=shared_prefixes,
        )


@dataclass(frozen=True)
class TokenLayout:
    """Positions of a micro-batch's tokens in the model's input and in the padded batch (frame).

    A row index selects one of the n * L rows of hidden states. A frame index selects one of the
    b * S positions of the frame.
    """

    frame: tuple[int, int]  # b, S
    input_ids: Tensor  # int64 [n, L]
    positions: Tensor  # int64 [n, L], from 0 in every sequence
    longest: int  # all positions are below this number
    frame_indices: IntArray  # [n * L]: a frame index of each row's token, or PADDING
    ends: BoolArray  # [b * S]: true at the last token of each sequence
    segments: Segments | None  # None: every row of the model is a sequence
    cp_group: dist.ProcessGroup | None
    shared_tokens: tuple[IntArray, IntArray] | None = None  # rows and their other frame indices

    def all_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the row index and the frame index of each of the N tokens, int64 ``[N]`` each.

        Every frame index occurs once. Rows of a shared prefix occur several times.
        """
        rows, frame_indices = self._all_tokens()
        return self._to_device(rows), self._to_device(frame_indices)

    def predicted_tokens(self, selected: BoolArray | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each token, the index of the row that predicts it, and its frame index.

        Both are int64 ``[N]``. ``selected``: bool ``[b, S]``, true for the tokens to return.
        Default: all tokens except the first of each sequence.
        """
        rows, frame_indices = self._all_tokens()
        has_next = ~self.ends[frame_indices]
        rows, frame_indices = rows[has_next], frame_indices[has_next] + 1
        if selected is not None:
            is_selected = selected.ravel()[frame_indices]
            rows, frame_indices = rows[is_selected], frame_indices[is_selected]
        return self._to_device(rows), self._to_device(frame_indices)

    def take(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Select rows of ``hidden``, float ``[n * L, ...]``, by their indices, int64 ``[N]``."""
        return hidden[rows] if self.shared_tokens is None else take_rows(hidden, rows)

    def to_frame(self, values: Tensor, frame_indices: Tensor) -> Tensor:
        """Scatter the ``values`` ``[N, ...]`` of all ranks to ``[b, S, ...]``, with 0 elsewhere."""
        rows, length = self.frame
        frame = values.new_zeros(rows * length, *values.shape[1:])
        frame = frame.index_copy(0, frame_indices, values).view(rows, length, *values.shape[1:])
        return frame if self.cp_group is None else SumOverRanks.apply(frame, self.cp_group)

    def _all_tokens(self) -> tuple[IntArray, IntArray]:
        rows = np.flatnonzero(self.frame_indices != PADDING)
        tokens = rows, self.frame_indices[rows]
        if self.shared_tokens is None:
            return tokens
        rows, frame_indices = map(np.concatenate, zip(tokens, self.shared_tokens, strict=True))
        return rows, frame_indices

    def _to_device(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self.input_ids.device, non_blocking=True)


def build_layout(
    input_ids: Tensor,
    lengths: IntArray,
    rules: LayoutRules,
    tree: PrefixTree | None = None,
    sequences: Sequences | None = None,
) -> TokenLayout:
    """Arrange a micro-batch's tokens as input of the model.

    ``input_ids``: int64 ``[b, S]``, right-padded. ``lengths``: int64 ``[b]``, at most ``S``.
    ``tree``: prefixes whose tokens are computed once for several sequences. Default: none.
    ``sequences``: offset and length of each sequence. Default: every row is one sequence.
    """
    rows, width = input_ids.shape
    if tree is not None or sequences is not None or rules.packed or not len(lengths):
        sequences = sequences or Sequences.rows(lengths, width)
        return _packed(input_ids, sequences, tree or _unshared(sequences.lengths), rules)
    # One row per sequence.
    length = round_up(width, rules.row_multiple)
    column = np.arange(length)
    inside = column < lengths[:, None]
    index = np.arange(rows)[:, None] * width + column
    # Positions of padding are clamped, because the table of learned positions is finite.
    positions = torch.arange(length, device=input_ids.device).clamp(max=width - 1)
    return TokenLayout(
        frame=(rows, width),
        input_ids=functional.pad(input_ids, (0, length - width)) if length > width else input_ids,
        positions=positions.expand(rows, length),
        longest=length,
        frame_indices=np.where(inside, index, PADDING).ravel(),
        ends=_ends(Sequences.rows(lengths, width), rows * width),
        segments=None,
        cp_group=None,
    )


def _packed(
    input_ids: Tensor, sequences: Sequences, runs: PrefixTree, rules: LayoutRules
) -> TokenLayout:
    rows, width = input_ids.shape
    device = input_ids.device
    # Rows of this rank: each run padded and split over context-parallel ranks.
    padded = round_up(runs.lengths, rules.sequence_multiple)
    local = padded // rules.cp_size
    used = int(local.sum())
    # A micro-batch without sequences also runs the model, for the collectives in the model.
    total = round_up(max(1, used), rules.row_multiple)
    # The run of each row, its offset in the run, and its position in the sequence.
    run = np.arange(len(local)).repeat(local)
    offset = np.arange(used) - (np.cumsum(local) - local).repeat(local)
    if rules.cp_size > 1:
        chunk = (local // 2).repeat(local)
        offset = local_position(offset, chunk, rules.cp_rank, rules.cp_size)
    inside = offset < runs.lengths[run]
    position = runs.starts[run] + offset
    frame_indices = np.full(total, PADDING)
    first_token = sequences.offsets[runs.examples[run]]
    frame_indices[:used] = np.where(inside, first_token + position, PADDING)
    positions = np.zeros(total, np.int64)
    positions[:used] = np.minimum(position, width - 1)
    index = torch.from_numpy(frame_indices.clip(0)).to(device, non_blocking=True)
    ids = input_ids.flatten()[index] if input_ids.numel() else torch.zeros_like(index)
    return TokenLayout(
        frame=(rows, width),
        input_ids=ids[None],
        positions=torch.from_numpy(positions).to(device, non_blocking=True)[None],
        longest=max(1, width),
        frame_indices=frame_indices,
        ends=_ends(sequences, rows * width),
        segments=build_segments(
            padded,
            total,
            device,
            parents=runs.parents,
            tokens=runs.lengths,
            cp_rank=rules.cp_rank,
            cp_size=rules.cp_size,
            cp_group=rules.cp_group,
        ),
        cp_group=rules.cp_group,
        shared_tokens=_shared_tokens(runs, local, inside, position, sequences.offsets),
    )


def _shared_tokens(
    runs: PrefixTree, local: IntArray, inside: BoolArray, position: IntArray, starts: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Return row and frame index of every shared token, except in the first sequence of a run.

    ``local``: number of rows of each run. ``inside``: whether a row contains a token. ``position``:
    position of each row in its sequences. ``starts``: frame index of each sequence's first token.
    """
    not_example = runs.owners != runs.examples[runs.owned]
    if not not_example.any():
        return None
    owned, owners = runs.owned[not_example], runs.owners[not_example]
    counts = local[owned]
    first = (np.cumsum(local) - local)[owned]
    rows = np.arange(counts.sum()) + (first - (np.cumsum(counts) - counts)).repeat(counts)
    frame_indices = starts[owners].repeat(counts) + position[rows]
    return rows[inside[rows]], frame_indices[inside[rows]]


def _unshared(lengths: IntArray) -> PrefixTree:
    sequences = np.arange(len(lengths))
    return PrefixTree(
        starts=np.zeros_like(lengths),
        lengths=lengths,
        parents=np.full_like(lengths, -1),
        examples=sequences,
        owners=sequences,
        owned=sequences,
    )


def round_up(value: Number, multiple: int) -> Number:
    """Round ``value`` up to a multiple."""
    return -(-value // multiple) * multiple


def _ends(sequences: Sequences, size: int) -> BoolArray:
    ends = np.zeros(size, np.bool_)
    ends[sequences.offsets + sequences.lengths.clip(1) - 1] = True
    return ends


def framed_outputs(outputs: Tensor, layout: TokenLayout, *, right_shift: bool) -> TokenOutputs:
    """Scatter outputs of `ValueHead`, float ``[n * L, K]``, to ``[B, S, K]``, ``[B, S]`` for K = 1.

    ``right_shift``: write the output at token j to column j + 1. A critic's value in this column is
    that of the state before token j + 1, and must not depend on this token.
    """
    rows, tokens = layout.predicted_tokens() if right_shift else layout.all_tokens()
    outputs = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
    return TokenOutputs(layout.to_frame(layout.take(outputs, rows), tokens))
