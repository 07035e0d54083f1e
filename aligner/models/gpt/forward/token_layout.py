"""Layout of the tokens of a micro-batch in the model, and back.

Masks, losses and results live in the frame ``[b, S]``. The model runs on rows: the frame itself
(one row of the batch per sequence), or, packed or under context parallelism, one long row of all
tokens of this rank without the padding:

    frame [b, S] ─held tokens─► rows [n, L] ─► model ─► hidden rows ─► head ─► frame [b, S]

Where sequences share prefixes (`aligner.distributed.sequences`), the one long row has each run of
tokens once, and its rows stand at several places of the frame. Where rows of the frame hold several
sequences (`aligner.distributed.sequences`), each stands for itself in the one long row.

A row's hidden state predicts the token after it, which may be held by another rank: every rank
fills in what it knows and the frames are added up.
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

PADDING = -1
BoolArray = NDArray[np.bool_]
Number = TypeVar("Number", int, IntArray)


@dataclass(frozen=True)
class LayoutRules:
    """Rules for the layout of a role's micro-batches in the model."""

    packed: bool
    sequence_multiple: int  # tokens of a packed sequence, over all context-parallel ranks
    row_multiple: int  # length of the model's rows on one rank
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None  # None: nothing to add up
    shared_prefixes: bool = False  # where sequences have any, each goes through the model once

    @classmethod
    def of(
        cls,
        parallel: ParallelState,
        *,
        packed: bool,
        sequence_length_round: int,
        shared_prefixes: bool = False,
    ) -> "LayoutRules":
        """Under context parallelism every pass is packed: it costs nothing and pads nothing."""
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
    """One micro-batch as the model sees it."""

    frame: tuple[int, int]  # b, S
    input_ids: Tensor  # int64 [n, L]
    positions: Tensor  # int64 [n, L], from 0 in every sequence
    longest: int  # positions are below it
    held: IntArray  # [n * L]: index into b * S of a token in each row, or PADDING
    ends: BoolArray  # [b * S]: no token of the sequence follows
    segments: Segments | None  # None: every row of the model is a sequence
    cp_group: dist.ProcessGroup | None
    also: tuple[IntArray, IntArray] | None = None  # further rows and places: a row has several

    def held_tokens(self) -> tuple[Tensor, Tensor]:
        """Rows (into n * L) that hold a token, and its place in the frame (into b * S).

        Every place comes once; a row comes once for every sequence that has its token.
        """
        rows, places = self._held()
        return self._indices(rows), self._indices(places)

    def predicted_tokens(self, selected: BoolArray | None = None) -> tuple[Tensor, Tensor]:
        """Rows (into n * L) that a token follows, and its place in the frame (into b * S).

        As in `held_tokens`. ``selected``: [b, S], true for the tokens that are meant; default all.
        """
        rows, places = self._held()
        followed = ~self.ends[places]
        rows, places = rows[followed], places[followed] + 1
        if selected is not None:
            wanted = selected.ravel()[places]
            rows, places = rows[wanted], places[wanted]
        return self._indices(rows), self._indices(places)

    def take(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Float ``[n * L, ...]`` at ``rows``, int64 ``[N]``, of one of the methods above."""
        return hidden[rows] if self.also is None else take_rows(hidden, rows)

    def to_frame(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Values ``[N, ...]`` at ``tokens`` of ``[b, S, ...]``, 0 elsewhere, from all ranks."""
        rows, length = self.frame
        frame = values.new_zeros(rows * length, *values.shape[1:]).index_copy(0, tokens, values)
        frame = frame.view(rows, length, *values.shape[1:])
        return frame if self.cp_group is None else SumOverRanks.apply(frame, self.cp_group)

    def _held(self) -> tuple[IntArray, IntArray]:
        rows = np.flatnonzero(self.held != PADDING)
        if self.also is None:
            return rows, self.held[rows]
        return np.concatenate([rows, self.also[0]]), np.concatenate([self.held[rows], self.also[1]])

    def _indices(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self.input_ids.device, non_blocking=True)


def build_layout(
    input_ids: Tensor,
    lengths: IntArray,
    rules: LayoutRules,
    tree: PrefixTree | None = None,
    sequences: Sequences | None = None,
) -> TokenLayout:
    """Lay out a micro-batch.

    Args:
        input_ids: int64 ``[b, S]``, right-padded.
        lengths: int64 ``[b]``, at most ``S``.
        rules: see `LayoutRules`.
        tree: of the sequences: each of its runs stands in the model once; None: each sequence
            stands for itself.
        sequences: those of rows that hold several; None: every row is one.
    """
    rows, width = input_ids.shape
    if tree is not None or sequences is not None or rules.packed or not len(lengths):
        found = sequences or Sequences.rows(lengths, width)
        return _packed(input_ids, found, tree or _unshared(found.lengths), rules)
    length = round_up(width, rules.row_multiple)
    column = np.arange(length)
    inside = column < lengths[:, None]
    index = np.arange(rows)[:, None] * width + column
    # A padding position is clamped, because learned positions end somewhere.
    positions = torch.arange(length, device=input_ids.device).clamp(max=width - 1)
    return TokenLayout(
        frame=(rows, width),
        input_ids=functional.pad(input_ids, (0, length - width)) if length > width else input_ids,
        positions=positions.expand(rows, length),
        longest=length,
        held=np.where(inside, index, PADDING).ravel(),
        ends=_ends(Sequences.rows(lengths, width), rows * width),
        segments=None,
        cp_group=None,
    )


def _packed(
    input_ids: Tensor, sequences: Sequences, runs: PrefixTree, rules: LayoutRules
) -> TokenLayout:
    rows, width = input_ids.shape
    device = input_ids.device
    padded = round_up(runs.lengths, rules.sequence_multiple)
    local = padded // rules.cp_size
    used = int(local.sum())
    # A micro-batch without sequences still goes through the model, for the collectives there.
    total = round_up(max(1, used), rules.row_multiple)
    run = np.arange(len(local)).repeat(local)
    offset = np.arange(used) - (np.cumsum(local) - local).repeat(local)
    if rules.cp_size > 1:
        chunk = (local // 2).repeat(local)
        offset = local_position(offset, chunk, rules.cp_rank, rules.cp_size)
    inside = offset < runs.lengths[run]
    position = runs.starts[run] + offset
    held = np.full(total, PADDING)
    held[:used] = np.where(inside, sequences.offsets[runs.examples[run]] + position, PADDING)
    positions = np.zeros(total, np.int64)
    positions[:used] = np.minimum(position, width - 1)
    index = torch.from_numpy(held.clip(0)).to(device, non_blocking=True)
    ids = input_ids.flatten()[index] if input_ids.numel() else torch.zeros_like(index)
    return TokenLayout(
        frame=(rows, width),
        input_ids=ids[None],
        positions=torch.from_numpy(positions).to(device, non_blocking=True)[None],
        longest=max(1, width),
        held=held,
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
        also=_further_places(runs, local, inside, position, sequences.offsets),
    )


def _further_places(
    runs: PrefixTree, local: IntArray, inside: BoolArray, position: IntArray, first_places: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Rows of the sequences that are no run's example, and their places in the frame.

    ``local``: rows of each run. ``inside`` and ``position``: of each row, whether it holds a token,
    and its position in a sequence. ``first_places``: of each sequence, where it begins.
    """
    others = runs.owners != runs.examples[runs.owned]
    if not others.any():
        return None
    owned, owners = runs.owned[others], runs.owners[others]
    counts = local[owned]
    first = (np.cumsum(local) - local)[owned]
    rows = np.arange(counts.sum()) + (first - (np.cumsum(counts) - counts)).repeat(counts)
    places = first_places[owners].repeat(counts) + position[rows]
    return rows[inside[rows]], places[inside[rows]]


def _unshared(lengths: IntArray) -> PrefixTree:
    """Every sequence as a run of its own."""
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
    """The multiple at or above ``value``."""
    return -(-value // multiple) * multiple


def _ends(sequences: Sequences, size: int) -> BoolArray:
    ends = np.zeros(size, np.bool_)
    ends[sequences.offsets + sequences.lengths.clip(1) - 1] = True
    return ends
